"""Models of TorchRec's, beside TorchRec.

speed    DLRM with 26 pooled tables and Zipf ids, by pooling factor: samples/s here and under
         TorchRec's TrainPipelineSparseDist. On two hosts with a slow network (root and iproute2),
         or with --device cuda on GPU ranks, which may share one GPU through MPS
parity   DLRM and, if --peer names the folder of meta-recsys/generative-recommenders, DlrmHSTU:
         what is trained here equals what TorchRec's modules train

TorchRec is set up first on CPUs (.venv-peer)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from freescale.bench.common.options import make_parser, read_destination, run_command
from freescale.bench.common.torchrec import continue_in_peer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("torchrec", __doc__)
    parser.add_argument("what", nargs="?", choices=("speed", "parity"), default="speed")
    parser.add_argument("--peer", type=Path, help="parity: with generative_recommenders in it")
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    to = read_destination(options)
    status = continue_in_peer("torchrec", words)
    if status is not None:
        return status
    from freescale.bench.torchrec.parity import bench_parity

    return bench_parity(options.peer, to)


if __name__ == "__main__":
    run_command(main)
