"""Bytes that checkpoints write: a full one and 19 deltas beside 20 full ones, of a table of 4
million rows that is read by Zipf's law."""

from __future__ import annotations

from collections.abc import Sequence

from freescale.bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    to = read_destination(make_parser("checkpoint", __doc__).parse_args(arguments))
    from freescale.bench.checkpoint.bench import bench_checkpoint

    bench_checkpoint(to)
    return 0


if __name__ == "__main__":
    run_command(main)
