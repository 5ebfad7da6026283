"""What a loaded model recommends against what `freescale eval` ranks, on the same run."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

import freescale
from freescale.data.synthetic.generate import generate
from freescale.recommend.export import export_run
from freescale.recommend.requests import Requests
from freescale_bench.common.ranks import get_gpu_name, require_gpu
from freescale_bench.common.results import Destination, Row, at_most, write
from freescale_bench.recommend.serve import start_server

K = 100
USERS = 300  # whose scores are compared between forms
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
    for form in ("export", "exported program", "server"):
        difference = float(values[form]["largest_difference"])
        claims.append(
            at_most(f"score of the {form}, difference from the run's", NEAR, difference, "")
        )
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
    return [*rows, *_compare_forms(folder, run, device)]


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
def _compare_forms(folder: Path, run: Path, device: str) -> list[Row]:
    """Differences in scores: of an export, its program and a server, and of queries that are
    computed in bfloat16."""
    out = folder / "export"
    list(export_run(run, out, serving=True))
    model, exported = freescale.load(run, device), freescale.load(out, device)
    users = model.known_users.name(range(min(USERS, len(model.known_users))))
    requests, vectors = model.read(users=users), model.item_vectors()
    scores = model.encode_requests(requests) @ vectors.T
    moved = exported.encode_requests(requests) @ exported.item_vectors().T
    queries = _run_program(out, requests).to(device)
    with torch.autocast(device, torch.bfloat16):
        coarse = model.encode_requests(requests).float()
    ten, of_coarse = (
        each.topk(10, dim=1).indices.sort(dim=1).values for each in (scores, coarse @ vectors.T)
    )
    found = {
        "export": moved,
        "exported program": queries @ vectors.T,
        "bfloat16": coarse @ vectors.T,
    }
    rows: list[Row] = [
        {"arm": name, "largest_difference": float((each - scores).abs().max())}
        for name, each in found.items()
    ]
    rows[-1]["same_ten_percent"] = 100 * float((ten == of_coarse).all(1).double().mean())
    served = _ask_server(out, folder, model, requests)
    return [*rows, {"arm": "server", "largest_difference": served}]


def _run_program(out: Path, requests: Requests) -> Tensor:
    """Queries of the program of an export for serving."""
    program, past = torch.export.load(out / "encoder.pt2").module(), requests.past
    shape = len(past), int(past.lengths.max())
    there = np.arange(shape[1]) < past.lengths[:, None]
    assert past.times is not None
    columns = {"items": past.items, "times": past.times}
    given = {"lengths": torch.from_numpy(past.lengths)}
    for name, values in columns.items():
        padded = np.zeros(shape, np.int64)
        padded[there] = values
        given[name] = torch.from_numpy(padded)
    queries: Tensor = program(**given)
    return queries


def _ask_server(out: Path, folder: Path, model: freescale.Recommender, requests: Requests) -> float:
    """The largest difference of a score that `freescale serve` answers with."""
    past, largest = requests.past, 0.0
    expected = model.name(requests, *model.recommend_requests(requests, 10))
    assert past.times is not None
    with start_server(out, folder) as server:
        for user, first in enumerate(past.starts.tolist()):
            part = slice(first, first + int(past.lengths[user]))
            items = model.items.restore(past.items[part])
            body = json.dumps({"history": list(zip(items, past.times[part].tolist())), "k": 10})
            status, answer = server.send("POST", "/recommend", body.encode())
            assert status == 200, answer
            listed = json.loads(answer)["items"]
            scores = dict(zip(expected.items[user], expected.scores[user], strict=True))
            for place, one in enumerate(listed):
                near = scores.get(one["id"], expected.scores[user][place])
                largest = max(largest, abs(one["score"] - near))
    return largest
