"""What was asked of communication beside compute, and a whole run as a result with claims."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from freescale.ledger.machine import get_gpu_name
from freescale_bench.common.results import Asked, Destination, Row, make_claims, show_claims, write
from freescale_bench.overlap.bench import bench_overlap, find_best_collective
from freescale_bench.overlap.copies import WAYS
from freescale_bench.overlap.overlapped import FULL


def list_asked() -> Iterator[Asked]:
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


def make_best_rows(rows: list[Row]) -> list[Row]:
    """NCCL at the channel limit that slows each compute least: said, with no bar."""
    keep = ("case", "arm", "slower_percent", "messages", "messages_ms", "rate", "unit")
    return [
        {"group": "best setting of nccl"} | {name: row[name] for name in keep}
        for row in find_best_collective(rows)
    ]


def bench_claims(ranks: int, device: str, only: Sequence[str], to: Destination) -> int:
    """As `bench_overlap`, kept as a result with claims; of a whole run on GPUs only. Returns the
    exit status."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "overlap.json"
        if status := bench_overlap(ranks, device, only, output):
            return status
        found = json.loads(output.read_text(encoding="utf-8"))
    rows = [*found["rows"], *make_best_rows(found["rows"])]
    claims = make_claims(list_asked(), found["figures"])
    if device == "cpu" or only:
        show_claims(claims)
        print(f"{len(rows)} rows and {len(claims)} claims, not written: --output writes the rows")
        return 0
    command = f"freescale bench overlap --nproc {ranks}"
    more = {"settings": found["settings"]}
    write(f"overlap-{ranks}ranks", get_gpu_name(), command, rows, claims, ["triton"], to=to, **more)
    return 0
