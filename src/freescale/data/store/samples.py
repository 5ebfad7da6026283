"""The samples of windows of time: which events are predicted together, from which history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A sample: of which user; its first anchor among all events of the user; how many events there are
# from it to the last anchor; how many events are strictly earlier.
SAMPLE = np.dtype([("user", "<i8"), ("first", "<i4"), ("span", "<i4"), ("earlier", "<i4")])
# The same with the window and the time of its first anchor.
FOUND = np.dtype([*SAMPLE.descr, ("window", "<i8"), ("time", "<i8")])


@dataclass(frozen=True)
class SampleRule:
    """How the events of a window become samples.

    Attributes:
        window: length of a window, in the unit of the times. Windows begin at its multiples.
        most: anchors of a sample: consecutive ones of a user in one window.
        actions: of anchors; () means all.
        least: events that an anchor has before it. They are strictly earlier, or with
            `by_position` any that precede it in the history.
        by_position: events of equal time precede each other, as in the history of retrieval.
    """

    window: int
    most: int
    actions: tuple[int, ...] = ()
    least: int = 1
    by_position: bool = False


def find_samples(
    rule: SampleRule,
    users: NDArray[np.int64],
    begin: NDArray[np.int64],
    lengths: NDArray[np.int64],
    times: NDArray[np.int64],
    actions: NDArray[Any] | None,
    low: int,
    high: int,
) -> NDArray[Any]:
    """The samples [n] of type FOUND of some users, one user after another.

    Args:
        rule: how samples are made.
        users: [users] their ids.
        begin: [users] the first of the given events among all of the user's. No earlier one is of
            window `low` or later.
        lengths: [users] how many events are given.
        times: [events] of these.
        actions: [events]; None without actions.
        low: first window.
        high: one past the last window.
    """
    owner = np.repeat(np.arange(len(users)), lengths)
    position = np.arange(len(times)) - np.repeat(np.cumsum(lengths) - lengths - begin, lengths)
    if not len(times):
        return np.zeros(0, FOUND)
    # Of events of equal time, the first one: what is before it is strictly earlier.
    new = np.ones(len(times), bool)
    new[1:] = (np.diff(owner) != 0) | (np.diff(times) != 0)
    earlier = position[np.maximum.accumulate(np.where(new, np.arange(len(times)), 0))]
    windows = times // rule.window
    mask = (windows >= low) & (windows < high)
    mask &= (position if rule.by_position else earlier) >= rule.least
    if rule.actions:
        assert actions is not None
        mask &= np.isin(actions, rule.actions)
    anchors = np.flatnonzero(mask)
    if not len(anchors):
        return np.zeros(0, FOUND)
    # Pieces of at most `most` anchors of one user and window.
    change = (np.diff(owner[anchors]) != 0) | (np.diff(windows[anchors]) != 0)
    group = np.append(True, change)
    place = np.arange(len(anchors))
    place -= np.maximum.accumulate(np.where(group, place, 0))
    heads = np.flatnonzero(place % rule.most == 0)
    first, last = anchors[heads], anchors[np.append(heads[1:], len(anchors)) - 1]
    found = np.empty(len(heads), FOUND)
    found["user"], found["first"] = users[owner[first]], position[first]
    found["span"], found["earlier"] = last - first + 1, earlier[first]
    found["window"], found["time"] = windows[first], times[first]
    return found
