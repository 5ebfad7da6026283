"""Serving: what a new event of a user costs.

append  time of appending one event to the state of a history, against computing the history anew,
        from the batch on the host to the query on the host; rebuilds included"""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("recommend", __doc__)
    parser.add_argument("what", choices=("append",))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=5, help="of each arm (5)")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (1)")
    parser.add_argument("--trial", action="store_true", help="tiny sizes; writes no result")
    options = parser.parse_args(arguments)
    from freescale_bench.recommend.append import bench_append

    to = read_destination(options)
    bench_append(options.device, options.turns, options.threads, options.trial, to)
    return 0


if __name__ == "__main__":
    run_command(main)
