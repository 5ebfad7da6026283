"""Step time with a table at home in host memory or on a disk, behind a cache that is full and
evicts in every step, beside the same table on the device: ids by Zipf's law, and uniform ids, which
all miss."""

from __future__ import annotations

from collections.abc import Sequence

from freescale.bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("host_tables", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", default="90GB", help="of rows and row state, on each rank")
    parser.add_argument("--cache", default="8GB", help="of each rank")
    parser.add_argument("--shape", default="long", help="one of `freescale bench train`")
    parser.add_argument("--disk", help="a folder: an arm with the table there, too")
    parser.add_argument("--steps", type=int, default=60, help="that are timed, of each arm")
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="print the figures, write no result"
    )
    options = parser.parse_args(arguments)
    from freescale.bench.host_tables.bench import Setting, bench_host_tables
    from freescale.embedding.host_tables.tiers import parse_bytes

    size, cache = parse_bytes(options.size), parse_bytes(options.cache)
    setting = Setting(
        options.shape, options.device, size, cache, options.steps, options.disk, not options.trial
    )
    bench_host_tables(setting, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
