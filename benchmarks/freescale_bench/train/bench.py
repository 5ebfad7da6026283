"""`freescale bench train`: how well `freescale train` uses a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freescale.train.device_figures import watch_compilations
from freescale_bench.common.ranks import get_gpu_name, require_gpu
from freescale_bench.common.results import Destination, Target, make_claims, write
from freescale_bench.train.measure import measure_shape
from freescale_bench.train.shapes import SHAPES

OWN = ("short", "medium", "long", "wide")  # our shapes; the others are peers'
STEPS_OF_AN_EPOCH = 48  # of the MovieLens-like file, in batches of 128

TARGETS = [
    Target("short, no biases step_ms", "short, no biases: step", 5, "ms", at_least=False),
    Target("medium, no biases step_ms", "medium, no biases: step", 8, "ms", at_least=False),
    Target("long, no biases step_ms", "long, no biases: step", 57, "ms", at_least=False),
    Target("long, no biases tflop_per_s", "long, no biases: rate", 350, "TFLOP/s"),
    Target("long device_busy_percent", "long: device busy", 92, "%"),
    Target("wide, no biases step_ms", "wide, no biases: step", 145, "ms", at_least=False),
    *(
        Target(f"{name} biases", f"{name}: step, of that without biases", 1.12, "times",
               at_least=False)
        for name in ("long", "wide")
    ),
    *(
        Target(f"{name} SASRec", f"{name}, SASRec: step, of that of HSTU", 1.3, "times",
               at_least=False)
        for name in ("short", "medium")
    ),
    Target("nvidia fixed step_ms", "NVIDIA's fixed shape: step", 152, "ms", at_least=False),
    Target(
        "nvidia fixed tflop_per_s_by_nvidia", "NVIDIA's fixed shape: rate by NVIDIA's formula", 375,
        "TFLOP/s",
    ),
    Target(
        "nvidia jagged tflop_per_s_by_nvidia", "NVIDIA's jagged shape: rate by NVIDIA's formula",
        340, "TFLOP/s",
    ),
    Target("movielens epoch_s", "MovieLens-like: an epoch", 0.25, "s", at_least=False),
    Target("compilations after step 1", "compilations after step 1", 0, "", at_least=False),
    Target(
        "await batch percent", "wait for a batch, the longest of the four shapes", 1,
        "% of a step", at_least=False,
    ),
]  # fmt: skip


def measure_train(
    names: Sequence[str], device: str, folder: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measures shapes one after another. Returns rows and details."""
    compilations = watch_compilations()
    rows, details = [], []
    for name in names:
        begin = time.perf_counter()
        try:
            row, more = measure_shape(SHAPES[name], folder, device, compilations)
        except Exception as error:  # noqa: BLE001 - go on with the other shapes
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        rows.append(row)
        details.append(more)
        seconds = time.perf_counter() - begin
        print(f"{name}: {seconds:.0f} s: {json.dumps(row)}", file=sys.stderr, flush=True)
    return rows, details


def measure_peer(folder: Path, file: Path, epochs: int, device: str) -> dict[str, Any]:
    """Trains the public HSTU on the same file. `folder`: its code, with run_gr.py."""
    command = [sys.executable, str(folder / "run_gr.py"), "--data", str(file), "--config", "hstu"]
    done = subprocess.run(
        [*command, "--epochs", str(epochs), "--device", device],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"the peer failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def collect_figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Collects the figures of claims."""
    figures: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            number = value.get("median") if isinstance(value, dict) else value
            if isinstance(number, (int, float)):
                figures[f"{row['shape']} {name}"] = float(number)
    ours = [row for row in rows if "compilations_after_step_1" in row]
    for figure, other in (("biases", "{}, no biases"), ("SASRec", "{}, SASRec")):
        for name in OWN:
            pair = f"{name} step_ms", f"{other.format(name)} step_ms"
            if all(each in figures for each in pair):
                own, without = (figures[each] for each in pair)
                ratio = own / without if figure == "biases" else without / own
                figures[f"{name} {figure}"] = ratio
    if "movielens step_ms" in figures:
        figures["movielens epoch_s"] = figures["movielens step_ms"] * STEPS_OF_AN_EPOCH / 1e3
    figures["compilations after step 1"] = sum(row["compilations_after_step_1"] for row in ours)
    waits = [row["await_batch_percent"] for row in ours if row["shape"] in OWN]
    if waits:
        figures["await batch percent"] = max(waits)
    return figures


def bench_train(
    names: Sequence[str], device: str, peer: Path | None, keep: bool, to: Destination
) -> None:
    require_gpu(device)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows, details = measure_train(names or list(SHAPES), device, folder)
        if peer is not None:
            result = measure_peer(peer, folder / "movielens.parquet", 4, device)
            result.pop("data", None)  # the file's path
            rows.append({"shape": "movielens, public HSTU", **result})
    for row in rows:
        print(json.dumps(_shorten(row)))
    claims = make_claims(TARGETS, collect_figures(rows))
    if not keep:
        print(f"{len(rows)} rows and {len(claims)} claims, not written because of --try")
        print(json.dumps(details))
        return
    testbed = get_gpu_name() or "cpu"
    write(
        "train", testbed, "freescale bench train", rows, claims, ["triton"], to=to, details=details
    )  # fmt: skip


def _shorten(row: dict[str, Any]) -> dict[str, Any]:
    """For the terminal: only medians."""
    return {
        name: value["median"] if isinstance(value, dict) and "median" in value else value
        for name, value in row.items()
        if not isinstance(value, (list,))
    }
