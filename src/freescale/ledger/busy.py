"""What the main thread of a rank did with a step, and for what it waited. Pure functions over plain
data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

OTHER = "other"  # between the spans
# Spans in which the main thread waits for the rank's other threads: what is no wait for their
# collectives is for their own work.
LANES = ("arrive", "await batch", "await sums")

Part = tuple[int, int]  # begin and end


def own_waits(collectives: Sequence[Sequence]) -> list[list[Part]]:
    """Of each collective, the parts of its wait that count as its own: while several threads wait,
    the time belongs to the one that is done last. No moment is counted twice."""
    waits = sorted(
        (entry[-2], entry[-1], number)
        for number, entry in enumerate(collectives)
        if entry[-1] > entry[-2]
    )
    parts: list[list[Part]] = [[] for _ in collectives]
    # as nearly always
    if all(before[1] <= after[0] for before, after in zip(waits[:-1], waits[1:], strict=True)):
        for begin, end, number in waits:
            parts[number].append((begin, end))
        return parts
    taken: list[Part] = []
    for begin, end, number in sorted(waits, key=lambda wait: (-wait[1], wait[0], wait[2])):
        parts[number] = _without(begin, end, taken)
        taken = sorted([*taken, *parts[number]])
    return parts


def _without(begin: int, end: int, taken: Sequence[Part]) -> list[Part]:
    """What of [begin, end) is in none of `taken`, which are sorted and apart."""
    left: list[Part] = []
    for a, b in taken:
        if begin < min(a, end):
            left.append((begin, min(a, end)))
        begin = max(begin, b)
    return [*left, (begin, end)] if begin < end else left


def busy(
    begin: int, end: int, spans: Iterable[Sequence], collectives: Iterable[Sequence]
) -> dict[str, int]:
    """Nanoseconds by the name of the innermost span, without the waits for collectives; spans of
    other threads (`lane/name`) are not counted. With the waits, where these do not overlap, the sum
    is the duration of the step."""
    # (when, +1 or -1, a rule for ties, span; empty: a wait)
    edges: list[tuple[int, int, int, str]] = []
    for name, a, b in spans:
        if "/" not in name and b > a:
            # of spans that begin together, the longer is the outer one
            edges += [(a, 1, -b, name), (b, -1, 0, name)]
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
