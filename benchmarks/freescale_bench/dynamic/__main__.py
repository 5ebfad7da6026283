"""Dynamic tables.

stream  ids streamed through a full table on one core: ids/s and resident memory
batch   one batch of ids: looked up and gathered, and with new ids that evict rows, beside a gather
        from a static table; with the map on the device and on the host
step    a model with a full table, a tenth of the ids new in every step, beside a static table; with
        --nproc 4 on four ranks, which may share one GPU through MPS
Without one of these: stream on a CPU, batch on a GPU. With --device cpu the last two are tiny, to
try them: nothing is written"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("dynamic", __doc__)
    parser.add_argument("what", nargs="?", choices=("stream", "batch", "step"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ids", type=int, help="streamed in all (1 billion), or of a batch (1M)")
    parser.add_argument("--rows", type=int, help="of the table (1 million; 8 million; 50 million)")
    parser.add_argument("--evict", choices=("lru", "lfu"), default="lru")
    parser.add_argument("--nproc", type=int, default=1, help="step: ranks")
    parser.add_argument("--steps", type=int, help="step: that are timed, of each arm (60)")
    parser.add_argument("--samples", type=int, help="step: of a rank (64)")
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="print the figures, write no result"
    )
    options = parser.parse_args(arguments)
    what = options.what or ("batch" if options.device == "cuda" else "stream")
    if what == "step":
        return _step(options)
    tried = options.trial or (what == "batch" and options.device == "cpu")
    to = None if tried else read_destination(options)
    if what == "stream":
        from freescale_bench.dynamic.bench import bench_stream as bench
    else:
        from freescale_bench.dynamic.batch import bench_batch as bench
    ids, rows = options.ids, options.rows
    if what == "batch" and options.device == "cpu":
        ids, rows = ids or 2000, rows or 20_000
    bench(to, ids, rows, options.evict, options.device)
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
