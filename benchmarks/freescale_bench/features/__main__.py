"""Features of items: what they add to quality, and what they cost.

quality      seeds of a recipe with and without a file of attributes: HR@10 and NDCG@10, and HR@10
             of cold items, which have at most 5 training events
step         step time with a categorical feature of 1,000 values, against the same steps without
preparation  memory and time of preparing generated items and events, against histories alone"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("features", __doc__)
    parser.add_argument("what", choices=("quality", "step", "preparation"))
    parser.add_argument("--data", help="quality: as for `freescale train`")
    parser.add_argument("--items", help="quality: the attributes")
    parser.add_argument("--users", help="quality: attributes of users, too")
    parser.add_argument("--name", help="quality: of the data in the result (default: the file's)")
    parser.add_argument(
        "--recipe", help="quality: as for `freescale train` (default: its defaults)"
    )
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="NAME=VALUE",
        help="quality: another option of `freescale train`, e.g. epochs=25; repeatable",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, help="quality: number of seeds (5)")
    parser.add_argument("--no-targets", action="store_true", help="quality: only report")
    parser.add_argument("--jobs", type=int, default=1, help="quality: parallel runs (1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", action="append", help="step: of `freescale bench train`")
    parser.add_argument("--steps", type=int, default=100, help="step: timed steps per arm (100)")
    for name, count in (("item", 10_000_000), ("event", 100_000_000)):
        about = f"preparation: number of {name}s ({count:,})"
        parser.add_argument(f"--{name}-count", type=int, default=count, help=about)
    parser.add_argument(
        "--run-folder", type=Path, default=Path("runs/features"),
        help="quality: of the runs; preparation: of the files, removed at the end",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    to = read_destination(options)
    if options.what == "step":
        from freescale_bench.features.step import bench_step

        bench_step(options.device, options.shape, options.steps, to)
        return 0
    if options.what == "preparation":
        from freescale_bench.features.preparation import bench_preparation

        bench_preparation(options.item_count, options.event_count, options.run_folder, to)
        return 0
    if options.data is None or options.items is None:
        parser.error("quality needs --data and --items")
    from freescale_bench.features.quality import Plan, bench_quality

    plan = Plan(
        options.data, options.items, options.users, options.name or Path(options.data).stem,
        options.recipe, tuple(options.changes), options.seeds, options.jobs, options.device,
        options.run_folder, not options.no_targets,
    )  # fmt: skip
    bench_quality(plan, to)
    return 0


if __name__ == "__main__":
    run_command(main)
