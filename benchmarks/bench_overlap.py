"""Communication beside compute on GPU ranks, `freescale bench overlap`, with what was asked of it
as claims.

    python3 benchmarks/bench_overlap.py --commit HASH
    python3 benchmarks/bench_overlap.py --device cpu --nproc 2      # tiny, to try the script; writes nothing

Ranks that share one GPU talk over loopback sockets: NCCL's speed here says nothing about NVLink.
What its kernels take from the compute is real.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from results import Asked, claims_of, get_gpu_name, write  # noqa: E402

from freescale.bench.overlap import PARTS, bench_overlap, best_collective  # noqa: E402
from freescale.bench.overlapped import FULL  # noqa: E402
from freescale.bench.transfers import WAYS  # noqa: E402


def asked() -> Iterator[Asked]:
    text = (
        "compute beside hostwire's AllToAlls, as many as NCCL carries, longer than alone: the "
        "worst of products and layers"
    )
    yield Asked("hostwire, most slow-down, %", text, 1.5, "%", at_least=False)
    text = "the same beside as many as hostwire can carry"
    yield Asked(f"{FULL}, most slow-down, %", text, 1.5, "%", at_least=False)
    for way in WAYS:
        text = f"hostwire's copies {way}, of plain pinned copies: the worst of 16, 64 and 256 MB"
        yield Asked(f"copies {way}, worst % of plain", text, 85, "%")
    for arm, name, bound in (
        ("hostwire", "shared memory", "PCIe, both ways and all ranks at once"),
        ("hostwire over gloo", "gloo", "the slower of PCIe and gloo"),
        ("hostwire over tcp", "TCP", "the slower of PCIe and gloo"),
    ):
        for size in (16, 64, 256):
            text = f"AllToAlls of {size} MB over {name}, one at a time, of {bound}"
            yield Asked(f"{arm}, AllToAll of {size} MB, % of bound", text, 80, "%")
    yield Asked(
        "witness, hostwire",
        ("an AllToAll arrived while a kernel held every multiprocessor (1: it did)"),
        1,
        "",
    )
    yield Asked(
        "witness, nccl waited",
        ("the control: NCCL's did not arrive before the kernel's end (1: it did not)"),
        1,
        "",
    )


def best_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """NCCL at the channel limit that slows each compute least: said, with no bar."""
    keep = ("case", "arm", "slower_percent", "messages", "messages_ms", "rate", "unit")
    return [
        {"group": "best setting of nccl"} | {name: row[name] for name in keep}
        for row in best_collective(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, default=4, help="ranks")
    parser.add_argument(
        "--only", choices=PARTS, nargs="*", default=(), help=("some parts; nothing is written then")
    )
    parser.add_argument(
        "--commit", help=("of the tree that is measured, where it was copied without its history")
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "overlap.json"
        status = bench_overlap(options.nproc, options.device, options.only, output)
        if status:
            sys.exit(status)
        found = json.loads(output.read_text(encoding="utf-8"))
    rows = [*found["rows"], *best_rows(found["rows"])]
    made = claims_of(asked(), found["figures"])
    if options.device == "cpu" or options.only:
        for entry in made:
            print(
                f"{entry['claim']}: asked {entry['asked']}, measured {entry['measured']} "
                f"{entry['unit']}"
            )
        print(f"{len(rows)} rows and {len(made)} claims, not written")
        return
    copied = {"commit": options.commit} if options.commit else {}
    command = f"python3 benchmarks/bench_overlap.py --nproc {options.nproc}"
    more = {"settings": found["settings"], **copied}
    write(f"overlap-{options.nproc}ranks", get_gpu_name(), command, rows, made, ["triton"], **more)


if __name__ == "__main__":
    main()
