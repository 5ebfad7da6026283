"""Settings of --order time: lengths of windows, the windows of a run, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.config import RunConfig
from freescale.config.time_order import parse_duration
from freescale.data import ReadSpec
from freescale.data.batches.global_batches import GlobalBatches
from freescale.train.time_order import Calendar, plan_calendar

RANKING = {"task": "ranking", "labels": "click"}


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("1d", "s", 86_400),
        ("12h", "ms", 43_200_000),
        ("30min", "us", 1_800_000_000),
        ("2w", "s", 1_209_600),
        (" 5 s", "ns", 5_000_000_000),
        ("100", None, 100),
        ("100", "s", 100),
    ],
)
def test_lengths_of_windows(text, unit, expected):
    assert parse_duration(text).convert(unit) == expected


@pytest.mark.parametrize("text", ["", "0", "0d", "-1d", "1 year", "d", "1.5h", "1d12h"])
def test_what_is_no_length(text):
    with pytest.raises(ValueError, match="--window must be a length of time as 30min, 12h, 7d, or"):
        parse_duration(text)


def test_a_day_needs_a_unit():
    with pytest.raises(ValueError, match="--window 2d: the times of the data are of no known unit"):
        parse_duration("2d").convert(None)


def test_windows_of_a_run():
    day = 86_400
    calendar = plan_calendar(10 * day + 5, 16 * day + 9, day, None)
    assert calendar == Calendar(day, origin=10, first=11, last=16)
    assert list(calendar.trained) == [11, 12, 13, 14, 15]
    assert calendar.describe(12) == {"number": 2, "from": 12 * day, "to": 13 * day}
    assert plan_calendar(10 * day, 16 * day, day, 2).trained == range(14, 16)
    assert plan_calendar(-25, 25, 10, None).trained == range(-2, 2)
    for windows in (0, 1):
        with pytest.raises(ValueError, match=f"has {windows + 1} windows of 10 .* which leaves 0"):
            plan_calendar(5, 5 + 10 * windows, 10, None)
    with pytest.raises(ValueError, match=r"7 windows .*, and --windows 6 trains .* which leaves 5"):
        plan_calendar(0, 69, 10, 6)


def test_windows_after_a_time():
    """Those of a run that continues another one."""
    assert plan_calendar(5, 69, 10, None, since=39) == Calendar(10, origin=0, first=4, last=6)
    assert plan_calendar(5, 69, 10, 1, since=39).trained == range(5, 6)
    assert plan_calendar(5, 69, 10, 9, since=39).trained == range(4, 6)
    with pytest.raises(ValueError, match="within .* 40 to 50: .* --since 39 or --since 49"):
        plan_calendar(5, 69, 10, None, since=40)
    with pytest.raises(ValueError, match="no window of 10 .* is complete after 59"):
        plan_calendar(5, 69, 10, None, since=59)


REFUSED = [
    (
        {"split": "leave-one-out"},
        "--split leave-one-out with --order time: the last window is held",
    ),
    ({"split": "none"}, "--split none with --order time"),
    ({"split": "time", "split_time": 5}, "--split time with --order time"),
    ({"keep": "best", "evaluate_every": 1}, "--keep best with --order time: every window is"),
    ({"patience": 3, "evaluate_every": 1}, "--patience with --order time"),
    ({"anchor_actions": "1"}, "--anchor-actions 1 is of --task ranking: leave it out"),
    ({"min_history": 3}, "--min-history 3 is of --task ranking"),
    ({"history_pools": "1,2"}, "--history-pools 1,2 is of --task ranking"),
    ({"history_pools": "1,x", **RANKING}, "--history-pools must be different numbers of actions"),
    ({"anchor_actions": "1,1", **RANKING}, "--anchor-actions must be different numbers"),
    ({"history_pools": "1,2,4", "max_length": 2, **RANKING}, "shares --max-length 2 among 3 act"),
    ({"window": "month"}, "--window must be a length of time"),
    ({"windows": 0}, "--windows must be at least 1"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_do_not_go_with_it(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.from_settings({"data": "x", "order": "time", **settings})


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", "1d"), ("windows", 3), ("anchor_actions", "1"), ("min_history", 2)],
)
def test_settings_that_need_it(name, value):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} {value} is of --order time: add it"):
        RunConfig.from_settings({"data": "x", name: value, **RANKING})


def test_a_split_is_refused_when_a_run_resumes_too():
    base = RunConfig.from_settings({"data": "x", "order": "time"})
    with pytest.raises(ValueError, match="--split leave-one-out with --order time"):
        RunConfig.from_settings({"split": "leave-one-out"}, base)
    assert RunConfig.from_settings({"steps": 5}, base).data == base.data
    assert RunConfig.from_json(base.to_json()) == base


# ---- epochs of different sizes


class Sized(GlobalBatches):
    def __init__(self, sizes, global_batch, world=1):
        super().__init__(global_batch, world - 1, world, ReadSpec())
        self._sizes = sizes
        self._seek(0)

    @property
    def num_samples(self):
        return sum(self._sizes)

    fingerprints: dict = {}  # noqa: RUF012

    def batch(self, number):
        return self._find_slice(number)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    global_batch=st.integers(1, 12),
    world=st.integers(1, 4),
)
def test_epochs_of_different_sizes(sizes, global_batch, world):
    """Batches of an epoch follow each other and end with it."""
    data = Sized(sizes, global_batch, world)
    expected = [
        (epoch, first, min(global_batch, size - first))
        for epoch, size in enumerate(sizes)
        for first in range(0, size, global_batch)
    ]
    assert data.stop == len(data) == len(expected)
    assert [data.batch(n)[:3] for n in range(data.stop)] == expected
    assert [data.find_epoch(n) for n in range(data.stop)] == [epoch for epoch, _, _ in expected]
    assert data.find_epoch(data.stop) == len(sizes) and data.find_epoch(-1) == -1
    for number, (_, _, size) in enumerate(expected):
        low, high = data.batch(number)[3:]
        assert high == size and low == size * (world - 1) // world
