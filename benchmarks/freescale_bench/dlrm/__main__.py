"""MLPerf's dlrm_v4_hstu: the model against the public one, and its speed on a GPU.

parity    logits, losses and gradients of `DlrmRanking` and of the public DlrmHSTU with the same
          weights (--public FOLDER, which contains generative_recommenders); needs TorchRec
step      samples/s and TFLOP/s of training steps with tables an eighth as long as the real ones,
          for samples of 4,096 tokens and of mixed lengths; with --public, of the public model too
learning  AUC on generated data with planted preferences, of the oracle's; with --public, of the
          public model on the same batches too
hot-ids   memory and bytes of 4 CPU ranks with one album in 30 % of the events, against uniform
          ids
generate  data in Yambda's layout with planted preferences, in a folder
host      a step of samples of 4,096 tokens with tables in host memory, against all on the GPU"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments and arguments[0] == "generate":  # has options of its own
        from freescale_bench.dlrm.generate import command

        return command(arguments[1:])
    parser = make_parser("dlrm", __doc__)
    parser.add_argument("what", choices=("parity", "step", "learning", "hot-ids", "host"))
    parser.add_argument("--public", type=Path, help="folder with the public model's package")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="step, host")
    parser.add_argument("--samples", type=int, help="step, host: of a batch of long ones (128)")
    parser.add_argument("--trial", action="store_true", help="tiny sizes; writes no result")
    # of a rank
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if options.what == "step":
        from freescale_bench.dlrm.step import bench_step

        bench_step(options.device, options.samples, options.public, options.trial, to)
        return 0
    if options.what == "host":
        from freescale_bench.dlrm.host import bench_host

        bench_host(options.device, options.samples, options.trial, to)
        return 0
    if options.what == "learning":
        from freescale_bench.dlrm.learning import bench_learning

        bench_learning(options.public, options.trial, to)
        return 0
    if options.what == "hot-ids":
        from freescale_bench.dlrm.hot_ids import bench_hot_ids, measure_rank

        if options.arm is None:
            return bench_hot_ids(options.trial, to)
        measure_rank(options.arm, options.trial, options.output)
        return 0
    if options.public is None:
        parser.error("parity needs --public FOLDER, a clone of meta-recsys/generative-recommenders")
    from freescale_bench.common.torchrec import require_torchrec

    require_torchrec()
    from freescale_bench.dlrm.parity import bench_parity

    bench_parity(options.public, options.trial, to)
    return 0


if __name__ == "__main__":
    run_command(main)
