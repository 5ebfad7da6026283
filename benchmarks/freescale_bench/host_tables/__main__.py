"""Step time with a table in host memory or on disk, behind a full cache that evicts rows in every
step, against the same table on the device. Ids follow Zipf's law, or never repeat (every row
misses).

place     (default) 90 GB on one rank, or with --nproc 4 20 GB on each of four ranks, which may
          share one GPU through MPS
torchrec  40 GB, against TorchRec's FUSED_UVM_CACHING with its prefetch pipeline

--device cpu: tiny sizes, to try the code; writes no results"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("host_tables", __doc__)
    parser.add_argument("what", nargs="?", choices=("place", "torchrec"), default="place")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of `place`")
    parser.add_argument("--size", help="rows and row state of each rank (90GB; 20GB; 40GB)")
    parser.add_argument("--cache", help="size on each rank (8GB; 2GB; a tenth)")
    parser.add_argument("--shape", help="one of `freescale bench train` (long)")
    parser.add_argument("--samples", type=int, help="per rank (the shape's; half of them)")
    parser.add_argument("--disk", help="a folder: adds an arm with the table there")
    parser.add_argument("--steps", type=int, help="timed steps per arm (60; 40; 60)")
    parser.add_argument(
        "--popularity", choices=("unique log", "unique"), default="unique log",
        help="torchrec: of rows, close to Zipf's law, or uniform",
    )  # fmt: skip
    parser.add_argument("--arm", action="append", help="torchrec: run this one; repeatable")
    # for the process of one arm
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="print the figures, write no result"
    )
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    return _compare(options, words) if options.what == "torchrec" else _place(options)


def _place(options: argparse.Namespace) -> int:
    from freescale.launch.ranks import is_rank
    from freescale_bench.host_tables.setting import choose_setting

    setting = choose_setting(options.device, options.nproc, not options.trial, vars(options))
    to = read_destination(options)
    if setting.ranks > 1 and not is_rank():
        from freescale_bench.common.ranks import start_ranks

        given = [*setting.as_arguments(), *to.as_arguments()]
        return start_ranks("host_tables", given, setting.ranks, setting.device, seconds=900)
    from freescale_bench.host_tables.bench import bench_host_tables

    bench_host_tables(setting, to)
    return 0


def _compare(options: argparse.Namespace, words: Sequence[str]) -> int:
    from freescale_bench.common.torchrec import continue_in_peer, require_torchrec

    if options.device == "cpu" and (status := continue_in_peer("host_tables", words)) is not None:
        return status
    require_torchrec()
    from freescale_bench.host_tables import peer

    chosen = peer.choose_comparison(
        options.device, options.size, options.cache, options.steps, options.popularity
    )
    if unknown := [name for name in options.arm or () if name not in peer.ARMS]:
        raise ValueError(f"there is no arm {unknown[0]!r}: use one of {', '.join(peer.ARMS)}")
    arms = options.arm or list(peer.ARMS)
    if options.output is None:
        return peer.compare(chosen, arms, not options.trial, read_destination(options))
    row = peer.measure_arm(arms[0], chosen)
    options.output.write_text(json.dumps(row), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_command(main)
