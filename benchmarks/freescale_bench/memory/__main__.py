"""Peak memory of a rank that trains a 2-million-row, 128-wide Adagrad table on 2 ranks."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    to = read_destination(make_parser("memory", __doc__).parse_args(arguments))
    from freescale_bench.memory.bench import bench_memory

    bench_memory(to)
    return 0


if __name__ == "__main__":
    run_command(main)
