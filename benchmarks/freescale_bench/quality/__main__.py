"""HR@10 and NDCG@10 of a recipe on a data set, over several seeds, against the popularity baseline
and a peer.

Every seed is a separate run in the run folder. Finished runs are not repeated; interrupted ones
resume from their last checkpoint. Figures are for the test part, over users with at least 4 events:
others have nothing to train on. The peer is the public HSTU (a folder with its run_gr.py) or a JSON
file of its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("quality", __doc__)
    parser.add_argument("--data", help="as for `freescale train`; required without --together")
    parser.add_argument("--name", help="of the data in the result (default: the file's)")
    parser.add_argument("--recipe", help="as for `freescale train` (default: its defaults)")
    parser.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of `freescale train`, e.g. epochs=25; repeatable",
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs (default: 1)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--run-folder", type=Path, help="of the runs (default: runs/quality/RECIPE-NAME)"
    )
    parser.add_argument(
        "--catalogue",
        choices=("unseen", "all"),
        default="unseen",
        help="unseen: compare with the peer without the items of a user's history; all: "
        "for data in which users return to items (default: unseen)",
    )
    parser.add_argument(
        "--peer", type=Path, help="folder of the public HSTU, to train on the same events"
    )
    parser.add_argument("--peer-config", help="of run_gr.py (default: the one matching the recipe)")
    parser.add_argument(
        "--peer-figures",
        type=Path,
        help="JSON file with run_gr.py's output for each seed; with --recbole, an earlier result "
        "whose row of RecBole's SASRec is reused",
    )
    parser.add_argument(
        "--recbole",
        nargs="?",
        const="",
        metavar="PYTHON",
        help="compare quality and seconds with RecBole's SASRec on CPUs instead; PYTHON is an "
        "interpreter with RecBole (default: .venv-recbole, set up first)",
    )
    parser.add_argument(
        "--together",
        type=Path,
        nargs="+",
        metavar="RESULT",
        help="train nothing; average the comparisons with the peer of several results",
    )
    options = parser.parse_args(arguments)
    if options.together:
        from freescale_bench.quality.together import bench_together

        bench_together(options.together, read_destination(options))
        return 0
    if options.data is None:
        parser.error("the following arguments are required: --data")
    from freescale_bench.quality.bench import Plan, bench_quality

    options.name = options.name or Path(options.data).stem
    plan = Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)})
    if options.recbole is not None:
        from freescale_bench.quality.recbole import bench_recbole

        bench_recbole(replace(plan, device="cpu"), options.recbole, read_destination(options))
    else:
        bench_quality(plan, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
