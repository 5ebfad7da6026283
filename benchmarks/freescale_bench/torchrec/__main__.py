"""TorchRec's models in FreeScale, against TorchRec.

speed    DLRM with 26 pooled tables and Zipf ids, by pooling factor: samples/s in FreeScale and in
         TorchRec's TrainPipelineSparseDist. On two hosts with a slow network (root and iproute2),
         or with --device cuda on GPU ranks, which may share one GPU through MPS
parity   DLRM and, if --peer names the folder of meta-recsys/generative-recommenders, DlrmHSTU:
         training in FreeScale equals training with TorchRec's modules

On CPUs TorchRec is set up first (.venv-peer)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import add_turns, make_parser, read_destination, run_command
from freescale_bench.common.torchrec import continue_in_peer, require_torchrec


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("torchrec", __doc__)
    parser.add_argument("what", nargs="?", choices=("speed", "parity"), default="speed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 20, 100])
    add_turns(parser, each=6, ranks="")
    parser.add_argument(
        "--peer", type=Path, help="parity: folder that contains generative_recommenders"
    )
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    to = read_destination(options)
    on_gpus = options.device == "cuda" and not options.trial
    if not on_gpus and (status := continue_in_peer("torchrec", words)) is not None:
        return status
    require_torchrec()
    if options.what == "parity":
        from freescale_bench.torchrec.parity import bench_parity

        return bench_parity(options.peer, to)
    from freescale_bench.torchrec.speed import bench_on_gpus, bench_on_hosts

    given = (options.factors, options.turns, options.each, options.trial, to)
    return (
        bench_on_gpus(options.nproc, *given) if options.device == "cuda" else bench_on_hosts(*given)
    )


if __name__ == "__main__":
    run_command(main)
