"""Which state a restart takes, who keeps copies for whom, and how often: pure functions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from freescale.train.state.chain import (
    Link,
    choose_buddies,
    choose_snapshots,
    explain_none,
    find_chains,
    must_merge,
)
from freescale.train.state.pace import choose_interval


def whole(owner, step, ranks=2):
    return Link(ranks, owner, step, None)


def since(owner, parent, step, ranks=2):
    return Link(ranks, owner, step, parent)


def names(*links):
    return [link.name for link in links]


@given(st.tuples(*[st.integers(0, 10**9)] * 3), st.none() | st.integers(0, 10**9))
def test_a_name_says_what_it_names(numbers, parent):
    link = Link(*numbers, parent)
    sound = parent is None or parent < link.step
    assert Link.parse(link.name) == (link if sound else None)


@pytest.mark.parametrize("name", ["", "2/0/3", "2/0/3/whole/x", "a/0/3/whole", "2/0/03/whole"])
def test_other_names_are_none(name):
    assert Link.parse(name) is None


def test_a_chain_ends_where_a_file_is_missing():
    held = names(whole(0, 3), since(0, 3, 6), since(0, 9, 12), since(0, 6, 8))
    assert {step: len(chain) for step, chain in find_chains(held)[2, 0].items()} == {
        3: 1,
        6: 2,
        8: 3,
    }
    merged = find_chains([*held, whole(0, 8).name])[2, 0]
    assert merged[8] == (whole(0, 8),)


links = st.builds(
    lambda ranks, owner, step, back: Link(
        ranks, owner, step, None if back is None else step - back
    ),
    st.sampled_from([2, 3]),
    st.integers(0, 2),
    st.integers(3, 8),
    st.none() | st.integers(1, 2),
)


@given(st.lists(st.lists(links, max_size=14), min_size=1, max_size=3), st.lists(st.integers(3, 8)))
def test_the_newest_step_that_is_complete_for_all_ranks(of_machines, refused):
    """Against an oracle that tries every step."""
    world = 3
    machines = [f"machine {rank % len(of_machines)}" for rank in range(world)]
    held = [names(*of_machines[rank % len(of_machines)]) for rank in range(world)]

    def is_there(machine, owner, step):
        there = {
            (link.step, link.parent)
            for link in of_machines[machine]
            if link.ranks == world and link.owner == owner
        }
        return (step, None) in there or any(
            (step, parent) in there and is_there(machine, owner, parent) for parent in range(step)
        )

    complete = [
        step
        for step in range(9)
        if step not in refused
        and all(
            any(is_there(machine, owner, step) for machine in range(len(of_machines)))
            for owner in range(world)
        )
    ]
    choice = choose_snapshots(held, machines, refused)
    assert (choice.step if choice is not None else None) == max(complete, default=None)
    if choice is None:
        assert explain_none(held)
        return
    for owner, (reader, chain) in enumerate(zip(choice.readers, choice.chains, strict=True)):
        assert {link.name for link in chain} <= set(held[reader])
        assert chain[0].parent is None and chain[-1].step == choice.step
        assert [link.parent for link in chain[1:]] == [link.step for link in chain[:-1]]
        # its own machine's before another's, and then by its own hands
        own = is_there(machines.index(machines[owner]), owner, choice.step)
        assert (reader == owner) == own


def test_why_there_is_none():
    assert "no snapshot is in memory" in explain_none([[], []])
    assert "are of 3 ranks, not 2" in explain_none([names(whole(0, 3, ranks=3)), []])
    assert "of rank 1 is in memory" in explain_none([names(whole(0, 3)), []])
    apart = [names(whole(0, 3)), names(whole(1, 6))]
    assert "no step in common" in explain_none(apart)
    assert choose_snapshots(apart, ["a", "b"]) is None


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


def test_changes_as_large_as_the_whole_are_merged_into_it():
    chain = [whole(0, 3), since(0, 3, 6), since(0, 6, 9)]
    assert not must_merge(dict(zip(chain, (100, 60, 40), strict=True)), chain)
    assert must_merge(dict(zip(chain, (100, 60, 41), strict=True)), chain)
    assert must_merge(dict(zip(chain, (100, 1, 1), strict=True)), chain, longest=2)
    assert not must_merge({chain[0]: 100}, chain[:1])
