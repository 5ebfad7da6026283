"""The kernels on one GPU, `freescale bench kernels`, with what was asked of them as claims.

python3 benchmarks/bench_kernels.py --commit HASH
python3 benchmarks/bench_kernels.py --device cpu      # tiny, through Triton's interpreter, to try the script; writes nothing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from results import Asked, claims_of, get_gpu_name, write  # noqa: E402

from freescale.bench.kernels import PARTS, measure_kernels  # noqa: E402
from freescale.bench.report import COLUMNS, cells, line  # noqa: E402


def asked() -> Iterator[Asked]:
    for kind in ("dispatch", "combine"):
        text = f"{kind} of ids, 128 samples a rank, W from 32 to 512: the slowest"
        yield Asked(f"{kind} of ids, slowest W, ms", text, 0.1, "ms", at_least=False)
    text = "moves of 128-wide bf16 payloads of 64 MB and more, of copy bandwidth: the worst"
    yield Asked("moves of payloads, worst % of ceiling", text, 70, "%")
    for name in ("gather", "sgd", "adagrad", "rowwise_adagrad", "adam"):
        yield Asked(
            f"{name}, % of ceiling",
            (f"{name} of 1,000,000 random rows of 128 floats, of copy bandwidth"),
            70,
            "%",
        )
    for way, width, rate in (
        ("forward", 128, 420),
        ("backward", 128, 260),
        ("forward", 64, 300),
        ("backward", 64, 200),
    ):
        text = f"attention {way}, 4 x 16,384 tokens, 4 heads of {width}"
        yield Asked(f"attention {way}, full, {width} wide, TFLOP/s", text, rate, "TFLOP/s")
        text = f"attention {way}, 4 heads of {width}, log-normal lengths, of the full-length rate"
        yield Asked(f"attention {way}, {width} wide, log-normal % of full", text, 85, "%")
    text = "HSTU layer forward + backward, log-normal lengths up to 21,000, faster than eager"
    yield Asked("layer, times faster", text, 5, "times")
    text = "peak memory of a layer per token, at 21,000 of that at 5,250"
    yield Asked(
        "layer, memory per token, longest over a quarter of it", text, 1.05, "times", at_least=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", choices=PARTS, nargs="*", default=(), help=("some parts; nothing is written then")
    )
    parser.add_argument(
        "--commit", help=("of the tree that is measured, where it was copied without its history")
    )
    options = parser.parse_args()
    print(line(COLUMNS))
    bench, figures = measure_kernels(
        options.device, options.only, lambda row: print(line(cells(row)), flush=True)
    )
    print(f"copy {bench.bandwidth:.2f} TB/s, bf16 matrix product {bench.flops:.0f} TFLOP/s")
    if options.device == "cpu" or options.only:
        print(f"{len(bench.rows)} rows and {len(claims_of(asked(), figures))} claims, not written")
        return
    copied = {"commit": options.commit} if options.commit else {}
    command = "python3 benchmarks/bench_kernels.py"
    write(
        "kernels",
        get_gpu_name(),
        command,
        bench.rows,
        claims_of(asked(), figures),
        ["triton"],
        ceilings=bench.ceilings,
        **copied,
    )


if __name__ == "__main__":
    main()
