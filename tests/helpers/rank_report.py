"""A rank that tells what kind of process it is: on standard output, as JSON. Its words are what it
does then: `exit STATUS`, `raise`, `wait` for a signal, `compute` on the GPU."""

from __future__ import annotations

import json
import os
import random
import signal
import sys

import numpy as np
import torch

from freescale.launch.ranks import follow_launcher
from freescale.launch.signals import SIGNALS


def describe() -> dict[str, object]:
    """What is the same in a rank that was forked and one that is a new process."""
    return {
        "argv": sys.argv,
        "path": sys.path[:2],
        "name": __name__,
        "main": sys.modules["__main__"].__spec__.name,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "nice": os.nice(0),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "handlers": [str(signal.getsignal(number)) for number in SIGNALS],
        "threads": torch.get_num_threads(),
        "parallel": torch.__config__.parallel_info(),  # of MKL, too
        "cores": sorted(os.sched_getaffinity(0)),
        "outputs": [os.isatty(number) for number in range(3)],
        "CUDA": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
    }


def main() -> None:
    follow_launcher()
    draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    with open(sys.argv[1], "w") as file:
        json.dump({"same": describe(), "draws": draws, "pid": os.getpid()}, file)
    os.rename(sys.argv[1], f"{sys.argv[1]}.json")
    print("said by the rank", file=sys.stderr)
    if sys.argv[2] == "exit":
        sys.exit(int(sys.argv[3]))
    if sys.argv[2] == "raise":
        raise RuntimeError("as told")
    if sys.argv[2] == "compute":
        assert torch.ones(3, device="cuda").sum().item() == 3
    if sys.argv[2] == "wait":
        signal.pause()


if __name__ == "__main__":
    main()
