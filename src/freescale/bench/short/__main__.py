"""Short histories on CPUs: time of a step and HR@10 with today's defaults, with negatives that the
batch shares, and at an earlier commit, in one run on 2 ranks."""

from __future__ import annotations

from collections.abc import Sequence

from freescale.bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("short", __doc__)
    parser.add_argument("--steps", type=int, default=629, help="of a run (default: an epoch)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each arm")
    options = parser.parse_args(arguments)
    from freescale.bench.short.bench import bench_short

    bench_short(options.steps, options.seeds, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
