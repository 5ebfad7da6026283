"""What the defaults of training are worth: one setting at a time is put back to what it was before,
on validation data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("learning", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="as of `freescale train`")
    parser.add_argument("--epochs", type=int, default=8, help="of a run")
    parser.add_argument("--max-length", type=int, default=100, help="of a history")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each arm")
    options = parser.parse_args(arguments)
    from freescale_bench.learning.bench import bench_learning

    bench_learning(
        options.data, options.epochs, options.max_length, options.seeds, read_destination(options)
    )
    return 0


if __name__ == "__main__":
    run_command(main)
