"""How well `freescale train` uses one GPU, shape by shape: step time, tokens and operations per
second, device utilization, launches, compilations and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("train", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", action="append", default=[], help="run this one; repeatable")
    parser.add_argument(
        "--peer", type=Path, help="folder of the public HSTU, to train on the same file"
    )
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="print the figures, write no result"
    )
    options = parser.parse_args(arguments)
    from freescale_bench.train.bench import bench_train

    bench_train(
        options.shape, options.device, options.peer, not options.trial, read_destination(options)
    )
    return 0


if __name__ == "__main__":
    run_command(main)
