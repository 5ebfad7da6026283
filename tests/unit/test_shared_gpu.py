"""Ranks that share a GPU under MPS, as far as a machine without one can see it."""

from __future__ import annotations

import pytest
import torch

from freescale.transport.connect import choose_device
from freescale.transport.shared_gpu import PART, count_queues, list_settings


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv(PART, raising=False)
    return monkeypatch


def test_ranks_share_a_gpu_that_is_divided(one_gpu):
    with pytest.raises(ValueError, match=f"each rank needs its own.*{PART}"):
        choose_device("cuda", 3, 4)
    one_gpu.setenv(PART, "25")
    assert [choose_device("cuda", rank, 4).index for rank in range(4)] == [0] * 4


def test_ranks_of_two_gpus_are_dealt(one_gpu):
    one_gpu.setattr(torch.cuda, "device_count", lambda: 2)
    one_gpu.setenv(PART, "50")
    assert [choose_device("auto", rank, 4).index for rank in range(4)] == [0, 1, 0, 1]


def test_each_rank_is_a_host_of_its_own_for_nccl():
    found = [list_settings(rank, 4, True, {}) for rank in range(4)]
    assert len({settings["NCCL_HOSTID"] for settings in found}) == 4
    assert all(settings["NCCL_SOCKET_IFNAME"] == "lo" for settings in found)
    assert "NCCL_HOSTID" not in list_settings(0, 4, False, {})


def test_ranks_of_several_machines_do_not_talk_over_loopback():
    assert "NCCL_SOCKET_IFNAME" not in list_settings(0, 4, True, {"WORLD_SIZE": "8"})


def test_what_the_user_set_stays():
    given = {"NCCL_SOCKET_NTHREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "7"}
    assert given.items() <= list_settings(0, 4, True, given).items()


def test_queues_of_all_ranks_fit():
    assert [count_queues(ranks) for ranks in (1, 2, 4, 8, 100)] == ["32", "32", "16", "8", "1"]
