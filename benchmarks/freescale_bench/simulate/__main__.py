"""The simulator: against measured runs (`validate`), at the paper's setting to 4,096 GPUs (`paper`,
takes minutes), useful time under failures (`recovery`), and rows that cross between nodes once per
GPU or once per node (`exchange`). `calibrate` measures this machine, `useful` predicts the useful
time of any cluster."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments and arguments[0] == "calibrate":  # has options of its own
        from freescale_bench.simulate.calibrate import command

        command.main(list(arguments[1:]), "freescale simulate calibrate")
    if arguments and arguments[0] == "useful":
        from freescale_bench.simulate.recovery import command as predict

        predict.main(list(arguments[1:]), "freescale bench simulate useful")
    parser = make_parser("simulate", __doc__)
    parser.add_argument("part", choices=("validate", "paper", "recovery", "exchange"))
    parser.add_argument("--most", type=int, default=4096, help="paper: largest number of GPUs")
    parser.add_argument("--recovery", default="this-machine", help="recovery: costs of a failure")
    options = parser.parse_args(arguments)
    to = read_destination(options)
    from freescale_bench.simulate.bench import bench_paper, bench_recovery
    from freescale_bench.simulate.exchange import bench_predicted_exchange
    from freescale_bench.simulate.validation import validate

    if options.part == "paper":
        bench_paper(options.most, to)
    elif options.part == "recovery":
        bench_recovery(options.recovery, to)
    elif options.part == "exchange":
        bench_predicted_exchange(to)
    else:
        validate(to)
    return 0


if __name__ == "__main__":
    run_command(main)
