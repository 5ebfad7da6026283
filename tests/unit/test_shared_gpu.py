"""Ranks that share a GPU under MPS, as far as a machine without one can see it."""

from __future__ import annotations

import pytest
import torch

from freescale.transport import connect
from freescale.transport.connect import choose_device, take_gpu
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


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"


def test_a_gpu_that_another_process_is_leaving_is_asked_again(monkeypatch):
    answers, asked = [RuntimeError(BUSY)] * 3 + [None], []

    def set_device(device):
        asked.append(device)
        if (answer := answers[len(asked) - 1]) is not None:
            raise answer

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(connect.time, "sleep", lambda seconds: None)
    device = torch.device("cuda", 1)
    take_gpu(device)
    assert asked == [device] * 4


def test_a_gpu_that_stays_busy_is_named(monkeypatch):
    def set_device(device):
        raise RuntimeError(words)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(connect, "_BUSY_SECONDS", 0.2)
    words = BUSY
    with pytest.raises(ValueError, match="cuda:1 has been busy for 0 s.*nvidia-smi"):
        take_gpu(torch.device("cuda", 1))
    words = "CUDA error: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        take_gpu(torch.device("cuda", 1))
