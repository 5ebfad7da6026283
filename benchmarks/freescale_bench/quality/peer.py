"""The public HSTU (meta-recsys/generative-recommenders) as a peer: trained on the same events by
its run_gr.py, or given by its figures. None of its code is in this package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale_bench.common.jobs import Job

CONFIGS = {"hstu-small": "hstu", "hstu-large": "hstu-large", "sasrec": "sasrec"}  # by recipe
_KINDS = {"": "unfiltered", "/unseen": "filtered"}  # its names of both kinds of catalogue
RANKS = "ranks.csv"


@dataclass(frozen=True)
class PeerRun:
    """The result of a run of the peer."""

    figures: dict[str, float]  # hr@10, ndcg@10, hr@10/unseen, ndcg@10/unseen
    users: int | None
    ranks: NDArray[np.int64] | None  # [users, 3]: user_id, rank, rank among unseen items


def write_interactions(histories: Path, path: Path) -> None:
    """Writes the events of a histories file in the peer's format: user_id, item_id, timestamp, one
    row per event."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(histories, columns=["user_id", "item_id", "timestamp"])
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    lengths = columns["item_id"].value_lengths().to_numpy()
    users = np.repeat(columns["user_id"].to_numpy(), lengths)
    events = {name: columns[name].flatten() for name in ("item_id", "timestamp")}
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"user_id": users, **events}), temporary)
    temporary.replace(path)


def find_config(recipe: str | None, given: str | None) -> str:
    """Returns the configuration of run_gr.py to compare a recipe with."""
    found = given or CONFIGS.get(recipe or "")
    if found is None:
        raise ValueError(
            f"--peer-config is missing: the recipe {recipe!r} is not one of {', '.join(CONFIGS)}"
        )
    return found


def make_jobs(
    program: Path, config: str, data: Path, folder: Path, seeds: Sequence[int], epochs: int,
    device: str,
) -> list[Job]:  # fmt: skip
    """Makes the jobs of seeds that are not trained yet, each in folder/peer-SEED. They write ranks
    by user if run_gr.py supports it."""
    if not program.is_file():
        raise ValueError(f"--peer {program.parent} has no run_gr.py")
    missing = [seed for seed in seeds if read_run(folder / f"peer-{seed}") is None]
    if not missing:
        return []
    options = subprocess.run(
        [sys.executable, str(program), "--help"], capture_output=True, text=True, check=False
    ).stdout
    jobs = []
    for seed in missing:
        own = folder / f"peer-{seed}"
        command = [sys.executable, str(program), "--data", str(data), "--config", config]
        command += ["--epochs", str(epochs), "--seed", str(seed), "--device", device]
        command += ["--eval-every", "0"]
        command += ["--ranks", str(own / RANKS)] if "--ranks" in options else []
        jobs.append(Job(f"peer, seed {seed}", command, own / "log.txt"))
    return jobs


def read_run(folder: Path) -> PeerRun | None:
    """Reads a finished run, whose log ends with a line of JSON."""
    log = folder / "log.txt"
    lines = log.read_text(encoding="utf-8").strip().splitlines() if log.exists() else []
    if not lines or not lines[-1].startswith("{"):
        return None
    try:
        raw = json.loads(lines[-1])
    except json.JSONDecodeError:
        return None
    if "peer" not in raw:  # a line of an evaluation during training
        return None
    return parse_run(raw, folder / RANKS)


def parse_run(raw: dict[str, Any], ranks: Path) -> PeerRun:
    """Parses the last object that run_gr.py prints."""
    figures = {
        f"{metric}{suffix}": float(raw[kind][metric])
        for suffix, kind in _KINDS.items()
        for metric in ("hr@10", "ndcg@10")
    }
    return PeerRun(figures, raw.get("users"), _read_ranks(ranks) if ranks.exists() else None)


def read_figures(path: Path) -> list[PeerRun]:
    """Reads a JSON file: an object of run_gr.py, or a list with one per seed. `ranks` in an object
    names a CSV file in the same folder, with user_id, rank and rank_unseen.

    Raises:
        ValueError: names the file and the problem.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        runs = raw if isinstance(raw, list) else [raw]
        return [parse_run(run, path.parent / run.get("ranks", "no such file")) for run in runs]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not hold what run_gr.py prints, of each seed: {error!r}"
        ) from None


def _read_ranks(path: Path) -> NDArray[np.int64]:
    """Reads the columns user_id, rank and rank_unseen of a CSV file."""
    with path.open(encoding="utf-8") as file:
        head = file.readline().strip().split(",")
    wanted = ("user_id", "rank", "rank_unseen")
    if missing := [name for name in wanted if name not in head]:
        raise ValueError(f"{path} has no column {', '.join(missing)}; it has {', '.join(head)}")
    table = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64, ndmin=2)
    return table[:, [head.index(name) for name in wanted]]
