"""Step time with a table at home in host memory or on a disk, behind a cache that is full and
evicts in every step, beside the same table on the device: ids by Zipf's law, and ids that never
come again, so that every row misses.

--device cuda  90 GB on one rank; with --nproc 4 20 GB on each of four, which may share one GPU
               through MPS
--device cpu   tiny, to try it: nothing is written"""

from __future__ import annotations

from collections.abc import Sequence

from freescale.bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("host_tables", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, default=1, help="ranks")
    parser.add_argument("--size", help="of rows and row state, on each rank (90GB; 20GB)")
    parser.add_argument("--cache", help="of each rank (8GB; 2GB)")
    parser.add_argument("--shape", help="one of `freescale bench train` (long)")
    parser.add_argument("--samples", type=int, help="of a rank (the shape's; half of them)")
    parser.add_argument("--disk", help="a folder: an arm with the table there, too")
    parser.add_argument("--steps", type=int, help="that are timed, of each arm (60; 40)")
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="print the figures, write no result"
    )
    options = parser.parse_args(arguments)
    from freescale.bench.host_tables.setting import choose_setting

    setting = choose_setting(options.device, options.nproc, not options.trial, vars(options))
    to = read_destination(options)
    from freescale.train.launch import is_rank

    if setting.ranks > 1 and not is_rank():
        from freescale.bench.common.ranks import start_ranks

        words = [*setting.as_arguments(), *to.as_arguments()]
        return start_ranks("host_tables", words, setting.ranks, setting.device, seconds=900)
    from freescale.bench.host_tables.bench import bench_host_tables

    bench_host_tables(setting, to)
    return 0


if __name__ == "__main__":
    run_command(main)
