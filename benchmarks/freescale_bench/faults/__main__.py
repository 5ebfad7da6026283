"""Training under a storm of faults: kills of ranks, launchers and machines at every stage of a
step, a checkpoint and a restore, stalls, full disks, damaged checkpoints, jumping clocks, failing
links. The run is then compared with an undisturbed one: samples, losses, tables, row state,
weights, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freescale_bench.common.options import make_parser, read_destination, run_command

_USUAL: dict[str, dict[str, Any]] = {  # defaults
    "cpu": {"storms": 10, "jobs": 1, "faults": 100, "ranks": "2,4,2:4", "timeout": 5.0},
    "cuda": {"storms": 3, "jobs": 3, "faults": 10, "ranks": "4", "timeout": 20.0},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("faults", __doc__)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="of the ranks, which may share a GPU through MPS (cpu)",
    )
    parser.add_argument("--storms", type=int, help="storms on one machine (10; on GPUs 3)")
    parser.add_argument("--jobs", type=int, help="storms at a time on one machine (1; on GPUs 3)")
    parser.add_argument(
        "--host-storms",
        type=int,
        default=0,
        help="additional storms over two network namespaces; needs root and iproute2 (0)",
    )
    parser.add_argument(
        "--real-starts",
        type=int,
        default=0,
        help="additional faults, in runs started by `freescale train --restarts` and torchrun (0); "
        "ranks of the other storms are forked from a process that has imported torch",
    )
    parser.add_argument("--faults", type=int, help="faults per storm (100; on GPUs 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first storm (0)")
    parser.add_argument(
        "--ranks",
        help="of the storms, in turn; 2:4 changes the number after each fault (2,4,2:4; on GPUs 4)",
    )
    parser.add_argument(
        "--timeout", type=float, help="of the runs, in seconds (5; on GPUs, which start slowly, 20)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("storms"),
        help="folder of the runs; interrupted storms resume there (./storms)",
    )
    given = parser.parse_args(arguments)
    from freescale_bench.faults.bench import bench_faults
    from freescale_bench.faults.options import Options

    usual = {
        name: value if getattr(given, name) is None else getattr(given, name)
        for name, value in _USUAL[given.device].items()
    }
    options = Options(
        work=given.work,
        host_storms=given.host_storms,
        real_starts=given.real_starts,
        seed=given.seed,
        device=given.device,
        **usual,
    )
    return bench_faults(options, read_destination(given))


if __name__ == "__main__":
    run_command(main)
