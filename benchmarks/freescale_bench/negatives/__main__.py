"""What each kind of negatives does to HR@10 and NDCG@10 (validation): uniform, by popularity,
in-batch and mixed, with and without log-q correction, and the full softmax. One rank on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("negatives", __doc__)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        action="append",
        help="as of `freescale train`; may be given several times",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--steps", type=int, default=300, help="of a run (default: 300)")
    parser.add_argument(
        "--items", type=int, default=2000, help="most frequent ones of a file (default: 2,000)"
    )
    parser.add_argument(
        "--run-folder", type=Path, help="keeps finished runs; a second call goes on with the rest"
    )
    options = parser.parse_args(arguments)
    from freescale_bench.negatives.bench import bench_negatives

    bench_negatives(
        options.data,
        options.seeds,
        options.steps,
        options.items,
        options.run_folder,
        read_destination(options),
    )
    return 0


if __name__ == "__main__":
    run_command(main)
