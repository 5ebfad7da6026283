"""Copies of a run's state on a CPU, and how ranks share what a GPU has free."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from freescale.train.state import copies as state_copies
from freescale.train.state.copies import StateCopies, find_room
from freescale.transport.shared_gpu import PART, count_sharing

CPU = torch.device("cpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Plain memory in the place of a GPU's."""
    empty = torch.empty
    monkeypatch.setattr(state_copies, "_is_on_host", lambda value: False)
    monkeypatch.setattr(state_copies, "_PIECE", 8)
    monkeypatch.setattr(
        state_copies.torch, "empty", lambda size, dtype, **_: empty(size, dtype=dtype)
    )
    done = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(state_copies, "record_event", lambda **_: done)
    monkeypatch.setattr(state_copies, "new_stream", lambda device: None)
    monkeypatch.setattr(state_copies.torch.cuda, "stream", lambda stream: nullcontext())


def test_a_copy_keeps_its_value_and_what_is_a_copy_stays():
    copies, value = StateCopies(CPU), torch.arange(6.0)
    copied, same = copies.copy(value), copies.copy(value, is_copy=True)
    copies.seal()
    value.zero_()
    copies.finish()
    assert torch.equal(copied, torch.arange(6.0)) and same is value


@pytest.mark.parametrize("room", [0, 24, 40, 1000])  # bytes: for none, one, two or all of them
def test_copies_of_a_gpu_have_the_values_of_their_moment(room, as_on_a_gpu):
    """Pieces of two numbers; what has room is brought when all is taken."""
    values = [torch.rand(2, 3), torch.tensor(7.0), torch.rand(5), torch.rand(4, 3).t()]
    expected, copies = [value.clone() for value in values], StateCopies(CPU, room)
    copied = [copies.copy(value) for value in values]
    kept = torch.rand(7)
    copied.append(copies.copy(kept, is_copy=True))
    copies.seal()
    for value in values:
        value.zero_()
    copies.finish()
    for found, value in zip(copied, [*expected, kept], strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("room", [0, 30, 1000])
def test_small_tensors_of_a_gpu_are_copied_together(as_on_a_gpu, monkeypatch, room):
    """Views of one copy where there is room: those of a dtype that are small and contiguous."""
    monkeypatch.setattr(state_copies, "_SMALL", 28)
    values = {
        "small": torch.rand(2, 3),
        "none": torch.rand(0, 3),
        "turned": torch.rand(2, 3).t(),
        "one": torch.tensor(7.0),
        "whole": torch.tensor([3]),
        "wholes": torch.tensor([4, 5]),
        "alone": torch.tensor([True]),
        "large": torch.rand(9),
    }
    expected, copies = (
        {name: value.clone() for name, value in values.items()},
        StateCopies(CPU, room),
    )
    copied = copies.copy_all(values)
    copies.seal()
    for value in values.values():
        value.zero_()
    copies.finish()
    assert list(copied) == list(values)
    for name, value in expected.items():
        assert torch.equal(copied[name], value) and copied[name].shape == value.shape
    floats = {"small", "one"}
    together = {name for name, value in copied.items() if value._base is not None}
    assert together == {0: set(), 30: floats, 1000: floats | {"whole", "wholes"}}[room]


def test_a_gpu_is_asked_for_more_than_copies_once_had(as_on_a_gpu, monkeypatch):
    """Once, and only then."""
    asked = []
    monkeypatch.setattr(state_copies, "find_room", lambda device: asked.append(device) or 40)
    monkeypatch.setattr(state_copies, "_used_before", {})
    gpu = torch.device("cuda", 0)
    StateCopies(gpu).copy(torch.rand(8))
    assert asked == [gpu]
    again = StateCopies(gpu)
    again.copy(torch.rand(8))
    assert asked == [gpu]
    again.copy(torch.rand(8))
    assert asked == [gpu] * 2 and again._used == 64
    more = StateCopies(gpu)
    for _ in range(5):  # for the last of them there is no room
        more.copy(torch.rand(8))
    assert asked == [gpu] * 3 and more._used == 96


def test_a_cpu_has_no_memory_beside_the_hosts():
    assert find_room(CPU) == 0


def test_ranks_share_a_gpu_by_the_parts_that_they_were_given():
    given = {None: 1, "100": 1, "50": 2, "25": 4, "12": 8, "0": 100}
    for part, ranks in given.items():
        assert count_sharing({} if part is None else {PART: part}) == ranks
