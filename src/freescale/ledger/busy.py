"""What the main thread of a rank does with a step when it does not wait for a collective."""

from __future__ import annotations

from collections.abc import Iterable

from freescale.ledger.record import CollectiveRecord, Span

OTHER = "other"  # between the spans
# Spans in which the main thread waits for the rank's other threads. What is no wait for their
# collectives there is a wait for their own work.
LANE_WAITS = ("arrive", "await batch", "await sums")


def sum_busy(
    begin: int, end: int, spans: Iterable[Span], collectives: Iterable[CollectiveRecord]
) -> dict[str, int]:
    """Sums the time of the main thread by the name of the innermost span.

    Waits for collectives are left out, and so are spans of other threads (`thread/name`). With the
    waits, where these do not overlap, the sum is the duration of the step.

    Args:
        begin: Of the step, in nanoseconds.
        end: Of the step.
        spans: The spans of the step; inner ones lie within outer ones.
        collectives: The collectives of the step.

    Returns:
        Nanoseconds by name of span; `other` is time outside all spans.
    """
    # (when, +1 or -1, a rule for ties, name of the span; empty for a wait)
    edges: list[tuple[int, int, int, str]] = []
    for span in spans:
        if "/" not in span.name and span.end > span.begin:
            # of spans that begin together, the longer is the outer one
            edges += [(span.begin, 1, -span.end, span.name), (span.end, -1, 0, span.name)]
    for collective in collectives:
        if collective.done > collective.waited:
            edges += [(collective.waited, 1, 0, ""), (collective.done, -1, 0, "")]
    edges.sort()
    busy: dict[str, int] = {}
    stack: list[str] = []
    waits, now = 0, begin
    for when, change, _, name in [*edges, (end, 1, 0, "")]:
        when = min(max(when, begin), end)
        if not waits and when > now:
            current = stack[-1] if stack else OTHER
            busy[current] = busy.get(current, 0) + when - now
        now = when
        if not name:
            waits += change
        elif change > 0:
            stack.append(name)
        else:
            del stack[len(stack) - 1 - stack[::-1].index(name)]
    return busy
