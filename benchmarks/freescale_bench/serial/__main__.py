"""Samples/s of the serial schedule against TorchRec's TrainPipelineBase and
TrainPipelineSparseDist: 2 CPU ranks, each pinned to a core. Sets TorchRec up first (.venv-peer)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command
from freescale_bench.common.torchrec import continue_in_peer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("serial", __doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="steps of one repetition")
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    status = continue_in_peer("serial", words)
    if status is not None:
        return status
    from freescale_bench.serial.bench import bench_serial

    bench_serial(options.repetitions, options.steps, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
