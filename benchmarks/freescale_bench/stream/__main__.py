"""Runs that follow a source of events.

kills   kills -9 at random moments, of runs that follow a folder or a Kafka topic (librdkafka's mock
        of a cluster), while files come late, twice, and from a folder that is away for a moment:
        bits, against a run that nothing happens to, and events that are lost or trained twice
soak    a long stream of generated events from a folder: memory, files and processes of the run, and
        how far it lags behind
shift   a stream whose preferences change at once: windows until the model is as good as before,
        against a model that is not updated
deltas  what a run publishes against its exports: bits, and bytes
publish what publishing adds to a step
freshness  how long events take until they change recommendations"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command
from freescale_bench.common.results import Destination

_PARTS = ("kills", "soak", "shift", "deltas", "publish", "freshness")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("stream", __doc__)
    parser.add_argument("what", choices=_PARTS)
    parser.add_argument("--source", choices=("folder", "kafka"), default="folder", help="kills")
    parser.add_argument("--kills", type=int, default=100, help="kills: how many, at least (100)")
    parser.add_argument("--events", type=int, default=3_000_000, help="soak (3,000,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=8, help="freshness: windows (8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="publish")
    parser.add_argument("--nproc", type=int, help="publish: ranks (2 on CPUs, 4 on GPUs)")
    parser.add_argument("--turns", type=int, default=10, help="publish: turns of each arm (10)")
    parser.add_argument("--every", type=int, default=20, help="publish: steps of a turn (20)")
    parser.add_argument("--trial", action="store_true", help="tiny sizes; writes no result")
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if options.what == "kills":
        from freescale_bench.stream.kills import bench_kills

        bench_kills(options.source, options.kills, options.seed, options.trial, to)
    elif options.what == "soak":
        from freescale_bench.stream.soak import bench_soak

        bench_soak(options.events, options.seed, options.trial, to)
    elif options.what == "shift":
        from freescale_bench.stream.shift import bench_shift

        bench_shift(options.seed, options.trial, to)
    elif options.what == "deltas":
        from freescale_bench.stream.deltas import bench_deltas

        bench_deltas(options.trial, to)
    elif options.what == "freshness":
        from freescale_bench.stream.freshness import bench_freshness

        bench_freshness(options.windows, options.trial, to)
    else:
        return _publish(options, to)
    return 0


def _publish(options: argparse.Namespace, to: Destination) -> int:
    given = options.device, options.turns, options.every, options.trial
    if "RANK" in os.environ:
        from freescale_bench.stream.publish import bench_publish

        bench_publish(*given, to)
        return 0
    from freescale_bench.common.ranks import start_ranks

    ranks = options.nproc or (2 if options.device == "cpu" else 4)
    words = ["publish", "--device", options.device, "--turns", str(options.turns)]
    words += ["--every", str(options.every), *(["--trial"] if options.trial else [])]
    words += to.as_arguments()
    return start_ranks("stream", words, ranks, options.device, seconds=3000, threads=1)


if __name__ == "__main__":
    run_command(main)
