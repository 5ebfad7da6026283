"""How much AllToAlls over NCCL and hostwire slow down concurrent compute. A whole run on GPUs is
written as a result, with its targets as claims.

Ranks that share one GPU communicate over loopback sockets: NCCL's speed says nothing about NVLink.
The slow-down by its kernels is real."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("overlap", __doc__)
    parser.add_argument(
        "--nproc", type=int, default=4, help="ranks, which share GPUs if there are fewer"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to try the code"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=("products", "layer", "witness"),
        default=[],
        help="run this part; repeatable",
    )
    options = parser.parse_args(arguments)
    from freescale_bench.overlap.bench import bench_overlap

    return bench_overlap(options.nproc, options.device, options.only, read_destination(options))


if __name__ == "__main__":
    run_command(main)
