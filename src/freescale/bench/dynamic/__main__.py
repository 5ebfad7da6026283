"""Dynamic tables by themselves, without a model.

--device cpu   ids streamed through a full table on one core: ids/s and resident memory
--device cuda  one batch of ids: looked up and gathered, and with new ids that evict rows, beside a
               gather from a static table"""

from __future__ import annotations

from collections.abc import Sequence

from freescale.bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("dynamic", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ids", type=int, help="streamed in all (1 billion), or of a batch (1M)")
    parser.add_argument("--rows", type=int, help="of the table (1 million; 8 million)")
    parser.add_argument("--evict", choices=("lru", "lfu"), default="lru")
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="print the figures, write no result"
    )
    options = parser.parse_args(arguments)
    to = None if options.trial else read_destination(options)
    from freescale.bench.dynamic.bench import bench_batch, bench_stream

    bench = bench_stream if options.device == "cpu" else bench_batch
    bench(to, options.ids, options.rows, options.evict, options.device)
    return 0


if __name__ == "__main__":
    run_command(main)
