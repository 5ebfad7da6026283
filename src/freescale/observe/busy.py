"""What the main thread of a rank did with a step when it did not wait. A pure function over plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

OTHER = "other"  # between the spans


def busy(begin: int, end: int, spans: Iterable[Sequence], collectives: Iterable[Sequence]) -> dict[str, int]:
    """Nanoseconds by the name of the innermost span, without the waits for collectives; spans of other threads (`lane/name`) are
    not counted. With the waits, where these do not overlap, the sum is the duration of the step."""
    edges: list[tuple[int, int, int, str]] = []  # (when, +1 or -1, a rule for ties, span; empty: a wait)
    for name, a, b in spans:
        if "/" not in name and b > a:
            edges += [(a, 1, -b, name), (b, -1, 0, name)]  # of spans that begin together, the longer is the outer one
    for *_, waited, done in collectives:
        if done > waited:
            edges += [(waited, 1, 0, ""), (done, -1, 0, "")]
    edges.sort()
    spent: dict[str, int] = {}
    stack: list[str] = []
    waits, now = 0, begin
    for when, change, _, name in [*edges, (end, 1, 0, "")]:
        when = min(max(when, begin), end)
        if not waits and when > now:
            current = stack[-1] if stack else OTHER
            spent[current] = spent.get(current, 0) + when - now
        now = when
        if not name:
            waits += change
        elif change > 0:
            stack.append(name)
        else:
            del stack[len(stack) - 1 - stack[::-1].index(name)]
    return spent
