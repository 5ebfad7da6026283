"""HR@10 of a default run on real data against the popularity baseline, 2 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale.bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("quality", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="as of `freescale train`")
    options = parser.parse_args(arguments)
    from freescale.bench.quality.bench import bench_quality

    bench_quality(options.data, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
