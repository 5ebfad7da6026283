"""The chains at a snapshot holder: two complete states of each rank stay at any time, and nothing
that neither of them needs."""

from __future__ import annotations

import os

import pytest
import torch

from freescale.train.state.chain import Link, find_chains
from freescale.train.state.held import HeldChains, apply_changes, describe_segment, open_link
from freescale.train.state.holder_link import is_supported
from freescale.train.state.memory import write_segment

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory files are Linux's")


class Holder:
    """In this process."""

    def __init__(self):
        self.files = {}

    def put(self, name, file):
        self.files[name] = os.dup(file)

    def get(self, name):
        return os.dup(self.files[name]) if name in self.files else None

    def list(self):
        return list(self.files)

    def drop(self, names):
        for name in names:
            os.close(self.files.pop(name))


@pytest.fixture
def held():
    return HeldChains("run", Holder())


def keep(held, link, tensors):
    """Keeps a memory file and completes its snapshot."""
    segment = write_segment(describe_segment("run", link, {"step": link.step}), tensors)
    held.keep(link, segment)
    held.complete([link])
    segment.close()


def names(held):
    return sorted(held.link.list())


def test_of_whole_states_the_last_two_stay(held):
    for step in (3, 6, 9):
        keep(held, Link(2, 0, step, None), {"table/item/rows": torch.ones(4)})
        assert held.find_last(0) == Link(2, 0, step, None) and held.find_last(1) is None
    assert names(held) == ["2/0/6/whole", "2/0/9/whole"]


def read(held, step):
    """The rows that a restart would get."""
    first, *changes = find_chains(held.link.list())[2, 1][step]
    tables = {"item": {"rows": open_link(held.link, first).read()["table/item/rows"].clone()}}
    for link in changes:
        apply_changes(tables, open_link(held.link, link).read())
    return tables["item"]["rows"]


def test_two_states_of_a_chain_can_be_restored_before_and_after_it_is_merged(held):
    rows, states, merged = torch.zeros(300, 4), {}, 0
    keep(held, Link(2, 1, 0, None), {"table/item/rows": rows})
    states[0] = rows.clone()
    for step in range(1, 12):
        positions = torch.arange(step * 9, step * 9 + 100)
        rows[positions] = float(step)
        tensors = {"changed/item/positions": positions, "changed/item/rows": rows[positions]}
        keep(held, Link(2, 1, step, step - 1), tensors)
        states[step] = rows.clone()
        for each in (step - 1, step):
            assert torch.equal(read(held, each), states[each]), each
        merged += f"2/1/{step}/whole" in held.link.list()
    assert merged > 1
    assert len(names(held)) < 8 and "2/1/0/whole" not in names(held)


def test_later_states_are_given_up_and_those_of_others_dropped(held):
    for step in (3, 6):
        keep(held, Link(2, 0, step, None), {})
        keep(held, Link(2, 1, step, None), {})
    held.give_up_after(3)
    assert names(held) == ["2/0/3/whole", "2/1/3/whole"]
    held.drop_others({1}, 2)
    assert names(held) == ["2/1/3/whole"]
    held.drop_others({1}, 4)
    assert names(held) == []
