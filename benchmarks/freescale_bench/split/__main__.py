"""Histories that cost more than a rank's share, divided over ranks (--split-histories).

exact    losses, weights and tables of steps with a divided history, against whole ones: one of
         8,192 events on 1 to 4 CPU ranks in float64, staged against serial to the bit, resumed on
         other numbers of ranks; with --device cuda one of 65,536 events on 4 ranks in float32
step     straggler % and step time with one history of 32,768 events and 127 of about 1,000, whole
         and divided, on GPU ranks, which may share one GPU through MPS
memory   a history that does not fit on one rank, each limited to a share of the GPU, trains on
         several"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from freescale.launch.ranks import is_rank
from freescale_bench.common.options import make_parser, read_destination, run_command

PARTS = ("exact", "step", "memory")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("split", __doc__)
    parser.add_argument("part", choices=(*PARTS, "all"), help="all: with one command")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nproc", type=int, default=4, help="step, memory: ranks")
    parser.add_argument("--steps", type=int, default=30, help="step: of each arm")
    parser.add_argument("--profiled", type=int, default=0, help="step: steps to profile before")
    parser.add_argument("--trial", action="store_true", help="tiny sizes; writes no result")
    # of a rank
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    from freescale_bench.split import exact, memory, step
    from freescale_bench.split.setting import Setting

    given = options.device, options.nproc, options.steps, options.trial, options.profiled
    setting = Setting(*given)
    if is_rank():
        measure = {"exact": exact.measure, "step": step.measure, "memory": memory.measure}
        measure[options.part](setting, options.arm, options.output)
        return 0
    for part in PARTS if options.part == "all" else (options.part,):
        if part != "exact" and options.device == "cpu" and not options.trial:
            parser.error(f"{part} measures GPUs: --device cuda, or --trial for tiny sizes")
        bench = {"exact": exact.bench, "step": step.bench, "memory": memory.bench}[part]
        bench(setting, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
