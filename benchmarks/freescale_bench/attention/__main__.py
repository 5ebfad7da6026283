"""Softmax attention against SDPA and FlexAttention, biases on and off, and semi-local attention
against full, forward and backward, on one GPU."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command

PARTS = ("softmax", "biases", "semi-local")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("attention", __doc__)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny sizes in Triton's interpreter, to try the code",
    )
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="repeatable")
    parser.add_argument(
        "--try", dest="trial", action="store_true", help="print the figures, write no result"
    )
    options = parser.parse_args(arguments)
    from freescale_bench.attention.bench import bench_attention

    keep = not options.trial and options.device == "cuda" and not options.only
    bench_attention(options.device, options.only or PARTS, keep, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
