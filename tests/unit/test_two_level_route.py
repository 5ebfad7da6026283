"""Who leads for whom, and when there are two levels."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.embedding.two_level import (
    choose_exchange,
    is_two_level,
    order_by_leader,
    plan_route,
)

machines = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@given(machines)
def test_every_machine_has_one_leader_for_each_owner(machines):
    ranks = range(len(machines))
    routes = [plan_route("two-level", machines, rank) for rank in ranks]
    if not is_two_level("two-level", machines):
        assert all(route == plan_route("flat", machines, rank) for rank, route in enumerate(routes))
        assert all(route.through is None and 0 not in route.leads for route in routes)
        return
    for rank, route in enumerate(routes):
        assert route.near == [int(machine == machines[rank]) for machine in machines]
        for owner in ranks:
            leader = route.through[owner]
            assert machines[leader] == machines[rank]
            # both ends agree on who talks to whom
            assert routes[rank].leads[owner] == routes[owner].leaders[rank]
            assert routes[leader].leads[owner]
            assert all(
                routes[other].through[owner] == leader for other in ranks if route.near[other]
            )
        assert route.through[rank] == rank  # nothing travels twice within the owner's machine
        asking = [machines[other] for other in ranks if route.leaders[other]]
        assert sorted(asking) == sorted(set(machines))


@given(st.integers(2, 4), st.integers(2, 4))
def test_ranks_of_a_machine_share_the_owners(count, size):
    machines = [rank // size for rank in range(count * size)]
    for rank in range(count * size):
        route = plan_route("two-level", machines, rank)
        assert Counter(route.through) == dict.fromkeys(
            [other for other in range(count * size) if route.near[other]], count
        )
        assert sum(route.leads) == count


@given(machines.flatmap(lambda m: st.tuples(st.just(m), st.integers(0, len(m) - 1))), st.data())
def test_rows_go_to_the_leader_of_their_owner(case, data):
    machines, rank = case
    own = data.draw(st.lists(st.integers(0, 9), min_size=len(machines), max_size=len(machines)))
    through = plan_route("two-level", machines, rank).through or [rank] * len(machines)
    order, send = order_by_leader(through, own)
    assert sorted(order) == list(range(len(machines)))
    arriving = iter(order)
    for leader, count in enumerate(send):
        owners = [next(arriving) for _ in range(through.count(leader))]
        assert owners == [owner for owner, its in enumerate(through) if its == leader]
        assert sum(own[owner] for owner in owners) == count


@pytest.mark.parametrize(
    ("machines", "rdma", "expected"),
    [
        ([0], False, "flat"),
        ([0, 0, 0, 0], False, "flat"),
        ([0, 1, 2], False, "flat"),
        ([0, 0, 0, 1, 1, 1, 1], False, "flat"),
        ([0, 0, 0, 0, 1, 1, 1, 1], False, "two-level"),
        ([0, 0, 0, 0, 1, 1, 1, 1], True, "flat"),
    ],
)
def test_auto_follows_machines_and_checkpoints(machines, rdma, expected):
    assert choose_exchange("auto", machines, rdma)[0] == expected
    for name in ("flat", "two-level"):
        assert choose_exchange(name, machines, rdma) == (name, "as requested")
        assert choose_exchange("auto", machines, rdma, name) == (name, "as in the checkpoint")
        assert choose_exchange(name, machines, rdma, name) == (name, "as in the checkpoint")
    with pytest.raises(ValueError, match="pass --exchange two-level or auto"):
        choose_exchange("flat", machines, rdma, "two-level")
    with pytest.raises(ValueError, match="not 'nearest'"):
        choose_exchange("nearest", machines, rdma)
