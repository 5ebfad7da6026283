"""Balancing. `predicted` (default): partitioners over lengths, batches and ranks by the cost model,
and measured planning times. `measured`: straggler % and step time of real ranks: 2 pinned CPU ranks
or, with --device cuda, GPU ranks, which may share one GPU through MPS."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("balance", __doc__)
    parser.add_argument("part", choices=("predicted", "measured"), nargs="?", default="predicted")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, default=3, help="predicted: batches per setting")
    parser.add_argument(
        "--repetitions", type=int, default=5, help="predicted: planning times per batch"
    )
    parser.add_argument("--steps", type=int, default=100, help="measured: steps per arm")
    parser.add_argument("--nproc", type=int, default=4, help="measured: GPU ranks")
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if options.part == "measured":
        from freescale_bench.balance import measured

        if options.device == "cuda":
            return measured.bench_on_gpu(options.nproc, options.steps, to)
        measured.bench_on_cpu(options.steps, to)
        return 0
    from freescale_bench.balance import bench

    bench.bench_predicted(options.seeds, options.repetitions, to)
    return 0


if __name__ == "__main__":
    run_command(main)
