"""Runs that publish deltas, and exports that are compared with what subscribers have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from freescale.config import RunConfig
from freescale.recommend.export import export_run
from freescale.train.deltas.folder import DeltaFolder
from freescale.train.trainer import Trainer

# a row goes when it was not used for four steps: rows come and go all the time
EVICTING = "item=dynamic:1:after=4:default=learned"


def train(transport, config: RunConfig, folder: Path, steps: int | None = None, **settings) -> None:
    """Trains until a step, from where the run in the folder stands."""
    config = replace(config, train=replace(config.train, steps=steps, **settings))
    Trainer(config, folder, transport=transport, resume=(folder / "checkpoints").exists()).train()


def list_states(run: Path) -> list[tuple[int, int]]:
    """(number, step) of all that is published."""
    files = DeltaFolder(run / "deltas")
    full, deltas = files.list_numbers()
    found = {number: files.read(number, full=True).step for number in full}
    return sorted((found | {number: files.read(number).step for number in deltas}).items())


def read_export(folder: Path) -> dict[str, object]:
    """Everything in an export, by file."""
    found: dict[str, object] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "delta.json"):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found |= {f"{name}/{part}": value for part, value in load_file(path).items()}
        elif path.suffix == ".parquet":
            found[name] = pq.read_table(path).to_pydict()
        elif path.suffix == ".json":
            found[name] = json.loads(path.read_text())
            if name == "config.json":  # a run that resumes may have other limits
                found[name]["train"]["steps"] = None
        else:
            found[name] = path.read_bytes()
    return found


def find_differences(found: dict[str, object], expected: dict[str, object]) -> list[str]:
    """Names of what differs, to the bit."""
    return [
        name
        for name in sorted({*found, *expected})
        if not _equals(found.get(name), expected.get(name))
    ]


def _equals(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.numpy().tobytes() == other.numpy().tobytes()
    return type(one) is type(other) and one == other


def export(run: Path, out: Path, step: int) -> dict[str, object]:
    """The export of a checkpoint, as `freescale export` makes it."""
    list(export_run(run, out, str(step)))
    return read_export(out)
