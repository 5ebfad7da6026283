"""The staged schedule: exposed communication and samples/s of serial, TorchRec, stale (the control:
staged without handling collisions) and staged.

--device cpu   two hosts with a slow network, over collision rates, history lengths and hot ids;
               TorchRec is set up first (.venv-peer). Needs root and iproute2; about 25 minutes
--device cuda  GPU ranks, which may share one GPU through MPS, without TorchRec; about 2 minutes"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from freescale_bench.common.options import add_turns, make_parser, read_destination, run_command
from freescale_bench.common.torchrec import continue_in_peer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("staged", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repetitions", type=int, default=20, help="cpu: turns per arm")
    parser.add_argument(
        "--quick", action="store_true", help="cpu: a short run of everything; writes no results"
    )
    add_turns(parser, each=6)
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    to = read_destination(options)
    if options.device == "cuda":
        from freescale_bench.staged.gpu import bench_on_gpu

        return bench_on_gpu(options.nproc, options.turns, options.each, options.trial, to)
    status = continue_in_peer("staged", words)
    if status is not None:
        return status
    from freescale_bench.staged.bench import bench_staged

    bench_staged(options.repetitions, options.quick, to)
    return 0


if __name__ == "__main__":
    run_command(main)
