"""Copies of a run's state on a CPU, and how ranks share what a GPU has free."""

from __future__ import annotations

import torch

from freescale.train.checkpoint.host_copies import HostCopies, find_room
from freescale.transport.shared_gpu import PART, count_sharing

CPU = torch.device("cpu")


def test_a_copy_keeps_its_value_and_what_is_a_copy_stays():
    copies, value = HostCopies(CPU), torch.arange(6.0)
    copied, same = copies.take(value), copies.take(value, is_copy=True)
    copies.seal()
    value.zero_()
    copies.finish()
    assert torch.equal(copied, torch.arange(6.0)) and same is value


def test_a_cpu_has_no_memory_beside_the_hosts():
    assert find_room(CPU) == 0


def test_ranks_share_a_gpu_by_the_parts_that_they_were_given():
    given = {None: 1, "100": 1, "50": 2, "25": 4, "12": 8, "0": 100}
    for part, ranks in given.items():
        assert count_sharing({} if part is None else {PART: part}) == ranks
