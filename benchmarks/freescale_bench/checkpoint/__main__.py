"""What checkpoints and snapshots add to training, and how long restores take.

training   steps with a checkpoint every 50 (written asynchronously), and steps without
snapshots  the same with snapshots, then a restore from memory and one from disk
restore    restores only

--device cpu   two ranks
--device cuda  GPU ranks, which may share one GPU through MPS"""

from __future__ import annotations

import os
from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("checkpoint", __doc__)
    parser.add_argument("what", choices=("training", "snapshots", "restore"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nproc", type=int, help="ranks (2 on CPUs, 4 on GPUs)")
    parser.add_argument("--state", type=float, default=1.0, help="GB of state per rank (1)")
    parser.add_argument("--turns", type=int, default=6, help="turns with and without (6)")
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if "RANK" in os.environ:
        from freescale_bench.checkpoint.bench import Plan, bench_rank

        bench_rank(Plan(options.what, options.device, options.state, options.turns), to)
        return 0
    from freescale_bench.common.ranks import start_ranks

    ranks = options.nproc or (2 if options.device == "cpu" else 4)
    words = [options.what, "--device", options.device, "--state", str(options.state)]
    words += ["--turns", str(options.turns), *to.as_arguments()]
    return start_ranks("checkpoint", words, ranks, options.device, seconds=1800, threads=1)


if __name__ == "__main__":
    run_command(main)
