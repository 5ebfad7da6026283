"""What a trained model does for users: recommendations in batches, and a new event of a user.

append  time of appending one event to the state of a history, against computing the history anew,
        from the batch on the host to the query on the host; rebuilds included
batch   exact search of the best items for many users, against torch's matmul and topk
parity  what `freescale recommend` writes against what `freescale eval` ranks; differences between
        a run, its export and coarser numbers
serve   latency of `freescale serve` at 200 requests/s and at 1,000, memory over ten minutes, and
        hostile bodies; needs wrk"""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("recommend", __doc__)
    parser.add_argument("what", choices=("append", "batch", "parity", "serve"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=5, help="of each arm (5)")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (1)")
    parser.add_argument("--soak", type=int, help="serve: seconds of the longest load (600)")
    parser.add_argument("--trial", action="store_true", help="tiny sizes; writes no result")
    options = parser.parse_args(arguments)
    to, given = read_destination(options), (options.device, options.turns, options.threads)
    if options.what == "append":
        from freescale_bench.recommend.append import bench_append

        bench_append(*given, options.trial, to)
    elif options.what == "batch":
        from freescale_bench.recommend.batch import bench_batch

        bench_batch(*given, options.trial, to)
    elif options.what == "serve":
        from freescale_bench.recommend.serve import bench_serve

        bench_serve(options.trial, options.soak, to)
    else:
        from freescale_bench.recommend.parity import bench_parity

        bench_parity(options.device, options.trial, to)
    return 0


if __name__ == "__main__":
    run_command(main)
