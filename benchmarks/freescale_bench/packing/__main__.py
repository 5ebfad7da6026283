"""Packing and unpacking a rank's samples for the exchange, on the host, as training does it."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("packing", __doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args(arguments)
    from freescale_bench.packing.bench import bench_packing

    bench_packing(options.repetitions, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
