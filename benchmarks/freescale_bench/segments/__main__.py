"""Histories cut into segments.

quality     Recall@10 against the full sequence on --data and on generated histories, and the work
            of a request; takes up again what --rows holds
validation  settings of `quality` for generated histories, chosen on other users, items and seeds"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("segments", __doc__)
    parser.add_argument("part", choices=("quality", "validation"))
    parser.add_argument("--data", type=Path, help="quality: as of `freescale train`")
    parser.add_argument("--seeds", type=int, nargs="+", help="by default those of the result")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="models trained at a time, one core each"
    )
    parser.add_argument(
        "--rows", type=Path, default=Path("runs/segments-rows.jsonl"), help="quality: what is done"
    )
    parser.add_argument("--arms", nargs="+", help="validation: some of its arms")
    parser.add_argument("--epochs", type=int, nargs="+", default=[20], help="validation")
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if options.part == "validation":
        from freescale_bench.segments.validation import bench_validation

        bench_validation(options.arms, options.seeds, options.epochs, options.jobs, to)
        return 0
    if options.data is None:
        parser.error("quality needs --data")
    from freescale_bench.segments.bench import bench_segments

    bench_segments(options.data, options.seeds, options.jobs, options.rows, to)
    return 0


if __name__ == "__main__":
    run_command(main)
