"""Whether urgent traffic overtakes bulk, over hostwire's wires and over gloo groups, on two hosts
with a slow network. Needs root and iproute2; about 2 minutes."""

from __future__ import annotations

from collections.abc import Sequence

from freescale_bench.common.options import make_parser, read_destination, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("hostwire", __doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args(arguments)
    from freescale_bench.hostwire.bench import bench_hostwire

    bench_hostwire(options.repetitions, read_destination(options))
    return 0


if __name__ == "__main__":
    run_command(main)
