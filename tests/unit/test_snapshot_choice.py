"""Which state a restart takes, who keeps copies for whom, and how often: pure functions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from freescale.train.state.held import (
    Held,
    choose_buddies,
    choose_snapshots,
    explain_none,
    find_superfluous,
)
from freescale.train.state.pace import choose_interval


def names(*held):
    return [each.name for each in held]


@given(st.tuples(*[st.integers(0, 10**9)] * 3))
def test_a_name_says_what_it_names(numbers):
    held = Held(*numbers)
    assert Held.parse(held.name) == held


@pytest.mark.parametrize("name", ["", "2/0", "2/0/3/x", "a/0/3", "2/0/03", "2/0/-3x"])
def test_other_names_are_none(name):
    assert Held.parse(name) is None


snapshots = st.builds(Held, st.sampled_from([2, 3]), st.integers(0, 2), st.integers(3, 8))


@given(
    st.lists(st.lists(snapshots, max_size=14), min_size=1, max_size=3),
    st.lists(st.integers(3, 8)),
)
def test_the_newest_step_that_is_complete_for_all_ranks(of_machines, refused):
    """Against an oracle that tries every step."""
    world = 3
    machines = [f"machine {rank % len(of_machines)}" for rank in range(world)]
    held = [names(*of_machines[rank % len(of_machines)]) for rank in range(world)]
    complete = [
        step
        for step in range(9)
        if step not in refused
        and all(
            any(Held(world, owner, step) in there for there in of_machines)
            for owner in range(world)
        )
    ]
    choice = choose_snapshots(held, machines, refused)
    assert (choice.step if choice is not None else None) == max(complete, default=None)
    if choice is None:
        assert explain_none(held)
        return
    for owner, reader in enumerate(choice.readers):
        own = Held(world, owner, choice.step)
        assert own.name in held[reader]
        # its own machine's before another's, and then by its own hands
        assert (reader == owner) == (own.name in held[owner])


def test_why_there_is_none():
    assert "no snapshot is in memory" in explain_none([[], []])
    assert "are of 3 ranks, not 2" in explain_none([names(Held(3, 0, 3)), []])
    assert "of rank 1 is in memory" in explain_none([names(Held(2, 0, 3)), []])
    apart = [names(Held(2, 0, 3)), names(Held(2, 1, 6))]
    assert "no step in common" in explain_none(apart)
    assert choose_snapshots(apart, ["a", "b"]) is None


def test_the_last_two_of_each_rank_stay_that_a_machine_answers_for():
    own = [Held(2, 0, step) for step in (3, 6, 9)]
    copied = [Held(2, 1, step) for step in (6, 9)]
    others = [Held(2, 2, 9), Held(4, 0, 9)]
    held = names(*own, *copied, *others)
    assert find_superfluous(held, {0, 1}, own[-1]) == names(own[0], *others)
    assert find_superfluous(held, {0}, own[-1]) == names(own[0], *copied, *others)
    assert find_superfluous([*held, "another"], {0, 1, 2}, own[-1])[-1] == "another"


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_buddies_are_on_another_machine_and_evenly_chosen(machines):
    buddies = choose_buddies(machines)
    if len(set(machines)) == 1:
        assert buddies == [None] * len(machines)
        return
    assert all(machines[buddy] != machines[rank] for rank, buddy in enumerate(buddies))
    for machine in set(machines):  # of ranks on one machine, none has two more than another
        loads = [buddies.count(rank) for rank, where in enumerate(machines) if where == machine]
        assert max(loads) - min(loads) <= 1


def test_the_interval_is_the_least_that_keeps_up():
    assert choose_interval(10, 0.5, 0.1) == 10
    assert choose_interval(10, 2.01, 0.1) == 21
    assert choose_interval(10, 2.0, 0.0) == 10
