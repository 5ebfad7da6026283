"""The ladder: TorchRec's pipelines, then FreeScale with one technique more on each rung and with
the defaults of `freescale train`, on the same model, data and seeds.

--device cpu      two ranks in network namespaces with 200 Mbit/s between them (as root), else on
                  the loopback; TorchRec is set up first (.venv-peer). About 10 minutes
--device cuda     GPU ranks, which may share one GPU through MPS; with TorchRec if installed
--workload train  `freescale train` itself against TorchRec's pipelines, which train the same
                  Retrieval model on the same generated histories
--workload short  the same with histories of a few events"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from freescale_bench.common.options import add_turns, make_parser, read_destination, run_command
from freescale_bench.common.torchrec import continue_in_peer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("ladder", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    workloads = ("paper", "short", "train")
    parser.add_argument("--workload", choices=workloads, default="paper")
    parser.add_argument("--repetitions", type=int, default=20, help="cpu: turns per arm")
    parser.add_argument(
        "--short",
        action="store_true",
        help="cpu: serial against the full system, without TorchRec; writes no results",
    )
    add_turns(parser, each=8)
    parser.add_argument("--histories", help=argparse.SUPPRESS)  # for the ranks
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    to = read_destination(options)
    product = options.workload in ("train", "short")
    if options.short and product:
        parser.error("--short needs the workload paper")
    if options.device == "cuda":
        if options.short or options.workload not in ("paper", "train"):
            parser.error("on a GPU only the workloads paper and train exist, without --short")
        if options.workload == "train":
            from freescale_bench.ladder.product import bench_product_on_gpu

            return bench_product_on_gpu(
                options.nproc, options.turns, options.each, options.trial, options.histories, to
            )
        from freescale_bench.ladder.gpu import bench_on_gpu

        return bench_on_gpu(options.nproc, options.turns, options.each, options.trial, to)
    status = None if options.short else continue_in_peer("ladder", words)
    if status is not None:
        return status
    if product:
        from freescale_bench.ladder.product import bench_product

        bench_product(options.workload, options.repetitions, to)
        return 0
    from freescale_bench.ladder.bench import bench_ladder, compare_short

    if options.short:
        compare_short()
    else:
        bench_ladder(options.repetitions, to)
    return 0


if __name__ == "__main__":
    run_command(main)
