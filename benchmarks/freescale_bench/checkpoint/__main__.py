"""What checkpoints cost.

bytes     what is written: a full checkpoint and 19 deltas beside 20 full ones, of a table of 4
          million rows that is read by Zipf's law
training  wall time of steps with a checkpoint every 50, written beside training, and without: with
          --device cuda on GPU ranks, which may share one GPU through MPS"""

from __future__ import annotations

import os
from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("checkpoint", __doc__)
    parser.add_argument("what", nargs="?", choices=("bytes", "training"), default="bytes")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="training: of ranks"
    )
    parser.add_argument("--nproc", type=int, help="training: ranks (2 on CPUs, 4 on GPUs)")
    parser.add_argument("--state", type=float, default=1.0, help="training: GB of a rank (1)")
    parser.add_argument(
        "--turns", type=int, default=6, help="training: of 50 steps with and without (6)"
    )
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if options.what == "bytes":
        from freescale_bench.checkpoint.bench import bench_checkpoint

        bench_checkpoint(to)
        return 0
    if "RANK" in os.environ:
        from freescale_bench.checkpoint.training import Plan, bench_training

        bench_training(Plan(options.device, options.state, options.turns), to)
        return 0
    from freescale_bench.common.ranks import start_ranks

    ranks = options.nproc or (2 if options.device == "cpu" else 4)
    words = ["training", "--device", options.device, "--state", str(options.state)]
    words += ["--turns", str(options.turns), *to.as_arguments()]
    return start_ranks("checkpoint", words, ranks, options.device, seconds=1800, threads=1)


if __name__ == "__main__":
    run_command(main)
