"""Snapshots in memory: what they add to a step, and how long a restore takes from memory and from
disk; `restore`: only that.

--device cpu   two ranks
--device cuda  GPU ranks, which may share one GPU through MPS"""

from __future__ import annotations

import os
from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("snapshot", __doc__)
    parser.add_argument("what", nargs="?", choices=("all", "restore"), default="all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nproc", type=int, help="ranks (default: 2 on CPUs, 4 on GPUs)")
    parser.add_argument("--state", type=float, default=1.0, help="GB of state of a rank")
    parser.add_argument(
        "--every",
        type=int,
        default=10,
        help="steps, in a row beside auto",
    )
    parser.add_argument("--turns", type=int, default=12, help="of steps")
    parser.add_argument("--each", type=int, default=96, help="steps of a turn, or one interval")
    options = parser.parse_args(arguments)
    to = read_destination(options)
    ranks = options.nproc or (2 if options.device == "cpu" else 4)
    from freescale_bench.snapshot.bench import Plan, bench_rank

    plan = Plan(options.device, options.state, options.every, options.turns, options.each)
    if "RANK" in os.environ:
        bench_rank(plan, to, restores_alone=options.what == "restore")
        return 0
    from freescale_bench.common.ranks import start_ranks

    words = [options.what, *plan.as_arguments(), *to.as_arguments(), "--nproc", str(ranks)]
    return start_ranks("snapshot", words, ranks, options.device, seconds=1800, threads=1)


if __name__ == "__main__":
    run_command(main)
