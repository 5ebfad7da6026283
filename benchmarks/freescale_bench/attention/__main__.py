"""Softmax attention against SDPA and FlexAttention, biases on and off, and semi-local attention
against full, forward and backward, on one GPU. Or, with --quality, HR@10 and NDCG@10 of semi-local
attention against full, over several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
    parser.add_argument(
        "--quality", action="append", default=[], metavar="FILE", help="data set; repeatable"
    )
    parser.add_argument("--attend", default="first=8,last=32", help="with --quality")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="NAME=VALUE",
        help="with --quality: another option of `freescale train`; repeatable",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="with --quality")
    parser.add_argument("--jobs", type=int, default=1, help="with --quality: parallel runs")
    parser.add_argument("--run-folder", type=Path, default=Path("runs/attention-quality"))
    options = parser.parse_args(arguments)
    if options.quality:
        from freescale_bench.attention.quality import Setting, bench_quality

        setting = Setting(
            options.quality, options.attend, options.changes, options.seeds, options.jobs,
            options.device, options.run_folder,
        )  # fmt: skip
        bench_quality(setting, read_destination(options))
        return 0
    from freescale_bench.attention.bench import bench_attention

    keep = not options.trial and options.device == "cuda" and not options.only
    bench_attention(options.device, options.only or PARTS, keep, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
