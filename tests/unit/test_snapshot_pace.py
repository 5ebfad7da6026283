"""How often snapshots are taken: as asked for, as they keep up, and with `auto` as they cost at
most 1 % of training."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from freescale.config.train import TrainConfig
from freescale.train.state import pace as module
from freescale.train.state.pace import BUDGET, WINDOW, Pace, StepCosts, choose_affordable


@given(st.integers(1, 500), st.floats(0, 10), st.floats(0.001, 1))
def test_the_least_interval_within_the_budget(least, processor, per_step):
    found = choose_affordable(least, processor, per_step, 0.01)
    assert processor <= 0.01 * found * per_step * (1 + 1e-9)
    assert found == least or processor > 0.01 * (found - 1) * per_step * (1 - 1e-9)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        computed = 0.0

        def perf_counter(self):
            return self.now

        def process_time(self):
            return self.computed

    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def train(pace, clock, snapshots, cost, per_step=0.1, seconds=0.0):
    """Takes snapshots at a pace; `cost`: processor seconds of one, by the interval. The lines."""
    step, lines = 0, []
    pace.look(step, False, 0.0, 0.0)
    for _ in range(snapshots):
        step += pace.interval
        clock.now += pace.interval * per_step
        mine = pace.look(step, False, seconds, cost(pace.interval))
        cheap = mine | {"steps": 1, "cost_in_steps": 0.0}  # of another rank
        lines.append(pace.agree([cheap, mine]))
    return [line for line in lines if line is not None]


def test_auto_settles_where_the_budget_is_kept(clock):
    """Where a snapshot of more steps costs more, too: 30 ms and 0.2 ms for each step."""
    pace = Pace("auto")
    lines = train(pace, clock, 40, lambda steps: 0.03 + 0.0002 * steps)
    # 0.05 s = half of 1 % of 100 steps of 0.1 s: the other half is for marks; it grows by a quarter
    assert 100 <= pace.interval <= 125
    steps = [line["snapshot_interval"]["steps"] for line in lines]
    assert steps == sorted(set(steps)) and steps[-1] == pace.interval
    assert lines[-1]["snapshot_interval"]["percent"] <= 100 * BUDGET
    assert lines[0]["snapshot_interval"]["asked"] == "auto"


def test_auto_stays_where_snapshots_are_cheap(clock):
    pace = Pace("auto")
    first = pace.interval
    assert not train(pace, clock, 5, lambda steps: 0.001) and pace.interval == first


def test_a_number_is_kept_and_its_cost_told_once(clock):
    pace = Pace(10)
    (line,) = train(pace, clock, 5, lambda steps: 0.03)
    assert pace.interval == 10
    assert line["snapshot_cost"]["steps"] == 10 and line["snapshot_cost"]["percent"] == 3.0
    assert not train(Pace(10), clock, 5, lambda steps: 0.009)


@pytest.mark.parametrize("asked", [10, "auto"])
def test_it_keeps_up(clock, asked):
    pace = Pace(asked)
    lines = train(pace, clock, 3, lambda steps: 0.0, seconds=2.05)
    assert [line["snapshot_interval"]["steps"] for line in lines] == [21] and pace.interval == 21


def test_a_slow_moment_does_not_hide_what_snapshots_cost(clock):
    pace = Pace("auto")
    train(pace, clock, 3, lambda steps: 0.01)
    clock.now += 1000.0  # an evaluation
    train(pace, clock, 1, lambda steps: 0.05)
    assert pace.interval == 100


def test_the_cost_is_what_steps_after_a_snapshot_take_more(clock):
    costs = StepCosts()
    assert costs.estimate() == 0.0

    def make_steps(*seconds):
        for each in seconds:
            clock.computed += each
            costs.note_step()

    make_steps(*[0.1] * 20)
    expected = {9.0: 0.0, 0.04: 0.04, 0.5: 0.27, 0.06: 0.06}  # a whole one; the median of others
    for more, median in expected.items():
        costs.note_snapshot(usual=more != 9.0)
        make_steps(0.1, 0.1 + more, *[0.1] * (WINDOW - 2), 0.1, 3.0, 0.1)  # 3: something else
        assert costs.estimate() == pytest.approx(median)


def test_the_setting_is_a_number_or_auto():
    assert TrainConfig(snapshot_every="auto").snapshot_every == "auto"
    assert TrainConfig(snapshot_every=7).snapshot_every == 7
    for wrong, words in (("often", "a number or auto, not 'often'"), (0, "at least 1, got 0")):
        with pytest.raises(ValueError, match=f"--snapshot-every must be {words}"):
            TrainConfig(snapshot_every=wrong)
