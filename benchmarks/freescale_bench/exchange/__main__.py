"""The two-level exchange against the flat one: two hosts of two ranks each, joined by 200 Mbit/s.

Bytes across the link, by the ledger and by the kernel's counter of the network device, next to the
share of rows that both ranks of a host read; tables and losses of staged and serial; step times,
for which two ranks share a core. Needs root and iproute2; about 8 minutes."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("exchange", __doc__)
    parser.add_argument("--repetitions", type=int, default=20, help="turns per arm (20)")
    parser.add_argument("--trial", action="store_true", help="few turns; writes no result")
    options = parser.parse_args(arguments)
    from freescale_bench.exchange.bench import bench_exchange

    bench_exchange(options.repetitions, options.trial, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
