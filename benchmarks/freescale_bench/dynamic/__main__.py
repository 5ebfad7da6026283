"""Dynamic tables.

batch   (default) one batch of ids: lookup and gather, with and without new ids that evict rows,
        against a gather from a static table, with the id map on the device and on the host
step    a model with a full table and 10 % new ids in every step, against a static table; --nproc 4:
        on four ranks, which may share one GPU through MPS

--device cpu: tiny sizes, to try the code; writes no results"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("dynamic", __doc__)
    parser.add_argument("what", nargs="?", choices=("batch", "step"), default="batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ids", type=int, help="per batch (1 million)")
    parser.add_argument("--rows", type=int, help="of the table (8 million; 50 million)")
    parser.add_argument("--evict", choices=("lru", "lfu"), default="lru")
    parser.add_argument("--nproc", type=int, default=1, help="step: ranks")
    parser.add_argument("--steps", type=int, help="step: timed steps per arm (120)")
    parser.add_argument("--samples", type=int, help="step: per rank (64)")
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="print the figures, write no result"
    )
    options = parser.parse_args(arguments)
    if options.what == "step":
        return _step(options)
    from freescale_bench.dynamic.batch import bench_batch

    tiny = options.device == "cpu"
    ids, rows = options.ids or (2000 if tiny else None), options.rows or (20_000 if tiny else None)
    to = None if options.trial or tiny else read_destination(options)
    bench_batch(to, ids, rows, options.evict, options.device)
    return 0


def _step(options: argparse.Namespace) -> int:
    from freescale.launch.ranks import is_rank
    from freescale_bench.dynamic.step import bench_step, choose_setting

    setting = choose_setting(options.device, options.nproc, not options.trial, vars(options))
    to = read_destination(options)
    if setting.ranks > 1 and not is_rank():
        from freescale_bench.common.ranks import start_ranks

        given = [*setting.as_arguments(), *to.as_arguments()]
        return start_ranks("dynamic", given, setting.ranks, setting.device, seconds=900)
    bench_step(setting, to)
    return 0


if __name__ == "__main__":
    run_command(main)
