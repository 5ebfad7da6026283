"""What communication costs the compute beside it: NCCL's AllToAll and hostwire's. A whole run on
GPUs is kept as a result, with its targets as claims.

Ranks that share one GPU talk over loopback sockets: NCCL's speed there says nothing about NVLink.
What its kernels take from the compute is real."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("overlap", __doc__)
    parser.add_argument(
        "--nproc", type=int, default=4, help="ranks; they share the GPUs if there are fewer"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to try it"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=("products", "layer", "witness"),
        default=[],
        help="this part; may be given several times",
    )
    options = parser.parse_args(arguments)
    from freescale_bench.overlap.bench import bench_overlap

    return bench_overlap(options.nproc, options.device, options.only, read_destination(options))


if __name__ == "__main__":
    run_command(main)
