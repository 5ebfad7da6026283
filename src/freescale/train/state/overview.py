"""The checkpoints of a run as one process sees them: which there are, whether they are intact, and
a chain made into one full checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from freescale.train.state.chain import Intact, find_needed, verify_checkpoint
from freescale.train.state.contents import Contents
from freescale.train.state.delta import TablePart, apply_deltas
from freescale.train.state.errors import explain_errors
from freescale.train.state.files import FORMAT, CheckpointFolder, Damaged, read_state
from freescale.train.state.find import find_best_step
from freescale.train.state.safe_reader import SafeReader
from freescale.train.state.writing import write_checkpoint
from freescale.transport.local import LocalTransport

_STATIC = 4  # entries about a table that is not dynamic
_OF_DELTAS = ("parent", "changed", "files")  # what a full checkpoint does not say, or says anew


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a folder."""

    step: int
    parent: int | None  # of a delta: the step whose changes it holds
    bytes: int  # of its own files
    saved: float  # seconds since 1970
    ranks: int
    best: bool
    problem: str = ""  # what is wrong with it, where one looked


def list_checkpoints(folder: Path, verify: bool = False) -> Iterator[Entry]:
    """The checkpoints in `folder`, in the order of their steps. `verify` reads all their files."""
    files, transport = CheckpointFolder(folder), LocalTransport()
    steps = files.steps()
    best = _find_best(files)
    known: dict[Path, Intact | Damaged] = {}
    for step in steps:
        path = files.path(step)
        state, problem = {}, ""
        try:
            state = read_state(path)
            if verify:
                verify_checkpoint(path, transport, known)
        except ValueError as error:
            problem = str(error)
        parent = state.get("parent")
        yield Entry(
            step,
            None if parent is None else int(parent["step"]),
            sum(file.stat().st_size for file in path.iterdir()),
            path.stat().st_mtime,
            int(state.get("ranks", 0)),
            step == best,
            problem,
        )


def _find_best(files: CheckpointFolder) -> int | None:
    """The best one, as the last that can be read has it."""
    for step in reversed(files.steps()):
        try:
            return find_best_step(read_state(files.path(step))["progress"])
        except (ValueError, OSError):
            continue
    return None


def compact_last(folder: Path) -> tuple[Path, list[int]]:
    """Makes the last checkpoint, a delta, a full one, and removes what only it depended on. The
    full one takes the delta's place when it is complete; a kill leaves one of the two. Needs host
    memory for a full checkpoint, and for no model.

    Args:
        folder: of the checkpoints, which no run uses.

    Returns:
        The checkpoint, and the steps that were removed: none if it was a full one already.

    Raises:
        ValueError: there is no checkpoint, or the chain is damaged or cannot be written.
    """
    files, transport = CheckpointFolder(folder), LocalTransport()
    steps = files.steps()
    if not steps:
        raise ValueError(f"{folder} holds no checkpoint: name the folder of a run")
    found = verify_checkpoint(files.path(steps[-1]), transport)
    if not found.ancestors:
        return found.path, []
    tensors = _read_whole(found)
    state = {key: value for key, value in found.state.items() if key not in _OF_DELTAS}
    state["format"] = FORMAT
    # was finite when it was saved, but for what may be infinite
    write_checkpoint(files, Contents(tensors, state, set(tensors), None), transport)
    parents, best = files.parents(), _find_best(files)
    chain = {int(link.state["progress"]["step"]) for link in found.ancestors}
    others = [step for step in parents if step not in chain or step == best]
    removed = sorted(chain - find_needed(parents, others))
    files.remove(removed)
    return files.path(steps[-1]), removed


def _read_whole(found: Intact) -> dict[str, Tensor]:
    """All tensors of a full checkpoint of the same state."""
    own = read_tensors(found.path, lambda name: not name.startswith("changed/"))
    tables = read_tensors(found.base.path, lambda name: name.startswith("table/"))
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in found.state["tables"]}
    for label, value in tables.items():
        name, _, part = label.removeprefix("table/").rpartition("/")
        # a dynamic table is [virtual shards, rows of each, ...]
        dynamic = len(found.state["tables"][name]) > _STATIC
        parts[name][part] = value.flatten(0, 1) if dynamic else value
    for name, tensors in parts.items():
        rows = int(found.state["tables"][name][0])
        apply_deltas(found.deltas, {name: TablePart(0, rows, tensors)})
    return own | tables


def read_tensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names are `wanted`, whole, as they were saved."""
    reader = SafeReader(path)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if wanted(name) and isinstance(entry, TensorStorageMetadata)
    }
    with explain_errors(f"checkpoint {path} could not be read"):
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors
