"""Which windows of time there are, and which of them are trained and tested."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calendar:
    """Windows by their numbers: window w has the times from w * length on. Windows of a day begin
    at midnight UTC, if times count from 1970 there, and stay as they are when data is added.

    Attributes:
        length: of a window, in the unit of the times.
        origin: the window of the first event.
        first: the first window that is trained. Statistics are of the events before it.
        last: the window of the last event, the test part.
    """

    length: int
    origin: int
    first: int
    last: int

    @property
    def trained(self) -> range:
        return range(self.first, self.last)

    def begin(self, number: int) -> int:
        """The first time of a window."""
        return number * self.length

    def describe(self, number: int) -> dict[str, int]:
        """A window for logs: its place among those of the data, and its times."""
        return {
            "number": number - self.origin,
            "from": self.begin(number),
            "to": self.begin(number + 1),
        }


def plan_calendar(
    first_time: int, last_time: int, length: int, trained: int | None, since: int | None = None
) -> Calendar:
    """Plans the windows of a run.

    Args:
        first_time: of the first event.
        last_time: of the last event.
        length: of a window.
        trained: how many windows are trained, at most: the last ones before that of the test part.
            None: all but the first, which has no events before it.
        since: the last time of a window; only later ones are trained. None: any.

    Raises:
        ValueError: there are not as many, or `since` lies within a window.
    """
    origin, last = first_time // length, last_time // length
    if since is not None:
        return Calendar(length, origin, _find_later(last, length, trained, since), last)
    most = last - origin - 1
    if most < 1 or (trained is not None and trained > most):
        wanted = "" if trained is None else f", and --windows {trained} trains as many"
        raise ValueError(
            f"the data has {last - origin + 1} windows of {length} (in the unit of its times)"
            f"{wanted}: the first has no history and the last is for the test, which leaves "
            f"{max(most, 0)}; give a shorter --window, or fewer --windows"
        )
    return Calendar(length, origin, last - (trained or most), last)


def _find_later(last: int, length: int, trained: int | None, since: int) -> int:
    """The first window that is trained, of those after a time."""
    first = (since + 1) // length
    if (since + 1) % length:
        raise ValueError(
            f"{since}, after which windows are trained, lies within the window from "
            f"{first * length} to {(first + 1) * length}: give the end of a window, "
            f"--since {first * length - 1} or --since {(first + 1) * length - 1}"
        )
    if first >= last:
        raise ValueError(
            f"no window of {length} (in the unit of the times) is complete after {since}: the "
            "last one of the data is for the test; give newer data"
        )
    return first if trained is None else max(first, last - trained)
