"""Settings of NCCL and CUDA for ranks that share a GPU, which CUDA's MPS divides among them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

PART = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # of a GPU, for each client of MPS
# hardware queues that ranks on one GPU can have together: with more, the last of them finds no
# memory
_QUEUES = 64
_MOST_QUEUES = 32  # of one process


class GpuBusy(ValueError):
    """A GPU is refused. Only another process can ask again: CUDA repeats its answer to this one."""

    exit_status = 76  # of the rank's process, which its launcher starts again


def is_divided(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks of this machine were given parts of a GPU."""
    return PART in environment


def count_sharing(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks share a GPU, by the part that each was given."""
    return max(1, 100 // max(1, int(environment.get(PART, 100))))


def count_queues(ranks: int) -> str:
    """CUDA_DEVICE_MAX_CONNECTIONS of each of several ranks on one GPU."""
    return str(min(_MOST_QUEUES, max(1, _QUEUES // ranks)))


def list_settings(
    rank: int, ranks: int, shared: bool, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables of a rank, of as many of this machine. A value that the user set stays."""
    # With fewer queues than streams, what waits in one stream holds up others.
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": count_queues(ranks) if shared else str(_MOST_QUEUES)}
    if shared:
        settings |= {
            # NCCL takes several ranks on one GPU if each names a host of its own
            "NCCL_HOSTID": f"{socket.gethostname()}-{rank}",
            # such ranks talk over loopback sockets: one stream is slow
            "NCCL_SOCKET_NTHREADS": "2",
            "NCCL_NSOCKS_PERTHREAD": "2",
        }
        if environment.get("WORLD_SIZE", str(ranks)) == str(ranks):  # all are here
            settings["NCCL_SOCKET_IFNAME"] = "lo"
    return {name: environment.get(name, value) for name, value in settings.items()}
