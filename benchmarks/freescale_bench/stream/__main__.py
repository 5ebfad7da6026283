"""Runs that follow a source of events.

kills   kills -9 at random moments, of runs that follow a folder or a Kafka topic (librdkafka's mock
        of a cluster), while files come late, twice, and from a folder that is away for a moment:
        bits, against a run that nothing happens to, and events that are lost or trained twice
soak    a long stream of generated events from a folder: memory, files and processes of the run, and
        how far it lags behind
shift   a stream whose preferences change at once: windows until the model is as good as before,
        against a model that is not updated"""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("stream", __doc__)
    parser.add_argument("what", choices=("kills", "soak", "shift"))
    parser.add_argument("--source", choices=("folder", "kafka"), default="folder", help="kills")
    parser.add_argument("--kills", type=int, default=100, help="kills: how many, at least (100)")
    parser.add_argument("--events", type=int, default=3_000_000, help="soak (3,000,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", action="store_true", help="tiny sizes; writes no result")
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if options.what == "kills":
        from freescale_bench.stream.kills import bench_kills

        bench_kills(options.source, options.kills, options.seed, options.trial, to)
    elif options.what == "soak":
        from freescale_bench.stream.soak import bench_soak

        bench_soak(options.events, options.seed, options.trial, to)
    else:
        from freescale_bench.stream.shift import bench_shift

        bench_shift(options.seed, options.trial, to)
    return 0


if __name__ == "__main__":
    run_command(main)
