"""Thresholded communication.

hosts       step time and traffic against dense AllReduce on two hosts with a slow network; needs
            root and iproute2
quality     HR@10 with and without, every arm with the same seeds, on --data and on generated
            histories; each run is kept in --run-folder, so that it can be interrupted and called
            again
validation  what more epochs and another dropout would bring: other seeds, the validation part"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("compress", __doc__)
    parser.add_argument("part", choices=("hosts", "quality", "validation"))
    parser.add_argument("--repetitions", type=int, default=20, help="hosts: turns of every arm")
    parser.add_argument("--data", type=Path, help="quality, validation: as of `freescale train`")
    parser.add_argument("--run-folder", type=Path, help="quality, validation: for the runs")
    parser.add_argument("--runs", type=int, help="quality: at most so many now")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, on two cores each")
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if options.part == "hosts":
        from freescale_bench.compress.traffic import bench_traffic

        bench_traffic(options.repetitions, to)
        return 0
    if options.data is None or options.run_folder is None:
        parser.error(f"{options.part} needs --data and --run-folder")
    if options.part == "quality":
        from freescale_bench.compress.quality import bench_quality

        bench_quality(options.data, options.run_folder, options.runs, options.parallel, to)
    else:
        from freescale_bench.compress.validation import bench_validation

        bench_validation(options.data, options.run_folder, options.parallel, to)
    return 0


if __name__ == "__main__":
    run_command(main)
