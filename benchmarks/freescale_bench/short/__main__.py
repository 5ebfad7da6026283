"""Short histories on CPUs: time of a step and HR@10 with today's defaults and at an earlier
commit, in one run on 2 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("short", __doc__)
    parser.add_argument(
        "--data", type=Path, help="interactions to train on (default: generated ones)"
    )
    parser.add_argument(
        "--steps", type=int, default=1258, help="of a run (default: two epochs of 40,226 users)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    options = parser.parse_args(arguments)
    from freescale_bench.short.bench import bench_short

    bench_short(options.data, options.steps, options.seeds, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
