"""Padding, straggler % and collisions of generated workloads over history cap, batch and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    to = read_destination(make_parser("workload", __doc__).parse_args(arguments))
    from freescale_bench.workload.bench import bench_workload

    bench_workload(to)
    return 0


if __name__ == "__main__":
    run_command(main)
