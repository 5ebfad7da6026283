"""What a loaded model recommends against what `freescale eval` ranks, on the same run."""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import freescale
from freescale.data.synthetic.generate import generate
from freescale.recommend.export import export_run
from freescale_bench.common.ranks import get_gpu_name, require_gpu
from freescale_bench.common.results import Destination, Row, at_most, write

K = 100
NEAR = 1e-5  # scores that are as good as equal
SIZES: dict[str, Any] = {"users": 3000, "items": 3000, "median": 40, "cap": 150}
# histories fit, so that the unseen items are the same for both
OPTIONS = {"width": 64, "layers": 2, "max-length": 200, "epochs": 3, "precision": "fp32"}


def bench_parity(device: str, trial: bool, to: Destination) -> None:
    require_gpu(device)
    with tempfile.TemporaryDirectory() as name:
        rows = _measure(Path(name), device, trial)
    for row in rows:
        print(row, flush=True)
    if trial:
        return
    values = {str(row["arm"]): row for row in rows}
    claims = [
        at_most(f"targets at another place, {kind}", 0, float(values[kind]["misplaced"]), "targets")
        for kind in ("all items", "unseen items")
    ]
    text = "score of an export or an exported program, difference from the run's"
    claims.append(at_most(text, NEAR, float(values["export"]["largest_difference"]), ""))
    testbed = get_gpu_name() if device == "cuda" else "cpu"
    command = f"freescale bench recommend parity --device {device}"
    write("recommend-parity", testbed, command, rows, claims, [], to=to, model=dict(OPTIONS))


def _measure(folder: Path, device: str, trial: bool) -> list[Row]:
    generate(
        folder / "histories.parquet", seed=0, **(SIZES if not trial else {**SIZES, "users": 60})
    )
    data, run = folder / "events.parquet", folder / "run"
    _write_events(folder / "histories.parquet", data)
    options = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    _call("train", "--data", data, "--folder", run, "--cache", folder / "cache", "--device", device,
          *options)  # fmt: skip
    ranks = folder / "ranks.csv"
    _call("eval", run, "--ranks", ranks, "--device", device)
    rows = []
    for kind, column, more in (
        ("all items", "rank", []),
        ("unseen items", "rank_unseen", ["--exclude-seen"]),
    ):
        out = folder / f"{column}.parquet"
        _call(
            "recommend", run, "--before", "test", "--k", K, "--out", out, "--device", device, *more
        )
        rows.append({"arm": kind, **_compare(ranks, column, out)})
    return [*rows, *_compare_forms(run, folder / "export", device)]


def _write_events(histories: Path, out: Path) -> None:
    """Interactions with ids that are text, so that every row of the table is an item."""
    table = pq.read_table(histories).combine_chunks()
    lists = {name: table.column(name).combine_chunks() for name in ("item_id", "timestamp")}
    counts = np.diff(lists["item_id"].offsets.to_numpy())
    users = np.repeat(table.column("user_id").to_numpy(), counts)
    pq.write_table(
        pa.table(
            {
                "user": users,
                "item": pa.array([f"i{item}" for item in lists["item_id"].flatten().to_pylist()]),
                "time": lists["timestamp"].flatten(),
            }
        ),
        out,
    )


def _call(*words: object) -> None:
    command = [sys.executable, "-m", "freescale", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _compare(ranks: Path, column: str, out: Path) -> dict[str, Any]:
    """Whether each target that is ranked at place r <= K is at place r, or within NEAR of it."""
    listed: dict[str, dict[str, tuple[int, float]]] = {}
    places: dict[tuple[str, int], float] = {}
    for row in pq.read_table(out).to_pylist():
        listed.setdefault(str(row["user"]), {})[row["item"]] = row["place"], row["score"]
        places[str(row["user"]), row["place"]] = row["score"]
    compared = misplaced = near = repeated = 0
    for row in csv.DictReader(ranks.open(encoding="utf-8")):
        user, rank = row["user_id"], int(row[column] or 0)
        if not 0 < rank <= K:
            continue
        place, score = listed[user].get(row["item_id"], (0, 0.0))
        if not place and column == "rank_unseen":
            repeated += 1  # a target that was seen is ranked, and not recommended
            continue
        compared += 1
        if place != rank:
            close = bool(place) and abs(places[user, rank] - score) <= NEAR
            near, misplaced = near + close, misplaced + (not close)
    return {"compared": compared, "misplaced": misplaced, "near": near, "seen_targets": repeated}


@torch.no_grad()
def _compare_forms(run: Path, out: Path, device: str) -> list[Row]:
    """Differences in scores: of an export, and of queries that are computed in bfloat16."""
    list(export_run(run, out))
    model, exported = freescale.load(run, device), freescale.load(out, device)
    users = model.known_users.name(range(min(500, len(model.known_users))))
    requests = model.read(users=users)
    scores = model.encode_requests(requests) @ model.item_vectors().T
    moved = exported.encode_requests(requests) @ exported.item_vectors().T
    with torch.autocast(device, torch.bfloat16):
        coarse = model.encode_requests(requests).float()
    rounded = coarse @ model.item_vectors().T
    ten = scores.topk(10, dim=1).indices.sort(dim=1).values
    same = (ten == rounded.topk(10, dim=1).indices.sort(dim=1).values).all(1).double().mean()
    return [
        {"arm": "export", "largest_difference": float((moved - scores).abs().max())},
        {
            "arm": "bfloat16",
            "largest_difference": float((rounded - scores).abs().max()),
            "same_ten_percent": 100 * float(same),
        },
    ]
