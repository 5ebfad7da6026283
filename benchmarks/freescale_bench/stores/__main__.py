"""Object stores and data engines, against real ones: an S3 server (moto's) on this machine with
50 ms of latency and 5 % errors; DuckDB and Spark.

  training     the first batch of four ranks from 100 files; training, resume and export
  publishing   kills of a process that publishes checkpoints, and writers that were taken over
  queries      histories by the queries of docs/guide/warehouse.md, against FreeScale's own

Needs s3fs and moto[s3], or duckdb, pyspark and Java: tests/integration/requirements.txt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("stores", __doc__)
    parts = ("training", "publishing", "queries")
    parser.add_argument("part", choices=parts, help="what to measure")
    parser.add_argument("--events", type=int, default=50_000_000, help="queries: how many events")
    parser.add_argument(
        "--run-folder", type=Path, default=Path("runs/stores"),
        help="of the files, removed at the end",
    )  # fmt: skip
    parser.add_argument("--trial", action="store_true", help="small, and writes no result")
    options = parser.parse_args(arguments)
    to, folder = read_destination(options), options.run_folder.absolute()
    if options.part == "training":
        from freescale_bench.stores.training import bench_training

        bench_training(folder, options.trial, to)
    elif options.part == "publishing":
        from freescale_bench.stores.publishing import bench_publishing

        bench_publishing(folder, options.trial, to)
    else:
        from freescale_bench.stores.queries import bench_queries

        bench_queries(options.events, folder, options.trial, to)
    return 0


if __name__ == "__main__":
    run_command(main)
