"""The event store, which samples in order of time are read from: time and memory of building it
from generated histories, of appending 1 % of newer events, of finding the samples of windows, and
samples/s of reading batches whose histories are the last events of three actions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("store", __doc__)
    about = "generated events (100,000,000)"
    parser.add_argument("--events", type=int, default=100_000_000, help=about)
    parser.add_argument(
        "--run-folder", type=Path, default=Path("runs/store"),
        help="of the files, removed at the end",
    )  # fmt: skip
    parser.add_argument("--trial", action="store_true", help="writes no result")
    options = parser.parse_args(arguments)
    from freescale_bench.store.bench import bench_store

    bench_store(options.events, options.run_folder, options.trial, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
