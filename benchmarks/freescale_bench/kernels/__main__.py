"""Time, rate, share of the measured ceiling, and speed-up over plain torch of each Triton kernel,
on one GPU. A whole run is written as a result, with its targets as claims; --output writes the rows
to another file instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("kernels", __doc__)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny sizes in Triton's interpreter, to try the code",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=("rows", "attention", "pieces", "layer", "sampled_softmax", "launches"),
        default=[],
        help="run this part; repeatable",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write instead of a result")
    options = parser.parse_args(arguments)
    from freescale_bench.kernels.bench import bench_kernels

    bench_kernels(options.device, options.only, options.output, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
