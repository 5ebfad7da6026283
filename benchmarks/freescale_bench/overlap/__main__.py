"""What communication costs the compute beside it: NCCL's AllToAll, hostwire's, and how fast each is
by itself. A whole run is kept as a result, with what was asked as claims; --output writes the rows
to a file of your own instead.

Ranks that share one GPU talk over loopback sockets: NCCL's speed there says nothing about NVLink.
What its kernels take from the compute is real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
        choices=("products", "layer", "alone", "throughput", "witness"),
        default=[],
        help="this part; may be given several times",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write instead of a result")
    options = parser.parse_args(arguments)
    from freescale_bench.overlap import bench, claims

    measured = (options.nproc, options.device, options.only)
    if options.output:
        return bench.bench_overlap(*measured, options.output)
    return claims.bench_claims(*measured, read_destination(options))


if __name__ == "__main__":
    run_command(main)
