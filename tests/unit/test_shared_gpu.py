"""Ranks that share a GPU under MPS, as far as a machine without one can see it."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from freescale.launch import ranks
from freescale.transport.connect import choose_device, take_gpu
from freescale.transport.shared_gpu import PART, GpuBusy, count_queues, list_settings

# rank 1 is refused so often; rank 0 waits for it
PROGRAM = """
import os, pathlib, sys, time
from freescale.cli.errors import exit_cleanly
from freescale.transport.shared_gpu import GpuBusy

@exit_cleanly
def main():
    folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
    before = len(list(folder.glob(rank + "-*")))
    (folder / f"{rank}-{before}").touch()
    if rank == "1" and before < int(sys.argv[2]):
        raise GpuBusy("cuda:1 is busy")
    (folder / f"met-{rank}").touch()
    while len(list(folder.glob("met-*"))) < 2:
        time.sleep(0.02)

main()
"""


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


def test_a_gpu_that_is_busy_is_another_process_to_ask_for(monkeypatch):
    def set_device(device):
        raise RuntimeError(words)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    words = BUSY
    with pytest.raises(GpuBusy, match="cuda:1 is busy.*nvidia-smi"):
        take_gpu(torch.device("cuda", 1))
    words = "CUDA error: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        take_gpu(torch.device("cuda", 1))


@pytest.mark.parametrize("refusals", [2, 1000])
def test_a_rank_whose_gpu_is_busy_is_started_again_alone(tmp_path, monkeypatch, refusals):
    """The other one waits for it; a GPU that stays busy fails the run."""
    (tmp_path / "gpu_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(ranks, "_NOTICE", 0.2)
    monkeypatch.setattr(ranks, "_BUSY", 240.0 if refusals == 2 else 1.0)
    ended = ranks.run_ranks([str(tmp_path), str(refusals)], 2, module="gpu_program", seconds=240)
    starts = [len(list(tmp_path.glob(f"{rank}-*"))) for rank in range(2)]
    if refusals == 2:
        assert ended.failed is None and starts == [1, 3]
    else:
        assert ended.failed == (1, GpuBusy.exit_status) and starts[0] == 1
    assert "busy" in ended.last_lines[1]
