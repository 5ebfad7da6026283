"""The checkpoints of a run as one process sees them: listed, verified, a chain made one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from freescale.train.state.contents import DiskContents
from freescale.train.state.disk import FORMAT, CheckpointFolder, find_needed, read_state
from freescale.train.state.intact import Intact, Known, find_best_step, verify_checkpoint
from freescale.train.state.memory import group_tables
from freescale.train.state.restore import TablePart, apply_deltas, read_tensors
from freescale.train.state.stored import open_folder
from freescale.train.state.writing import write_checkpoint
from freescale.train.torch_files.safe_reader import SafeReader
from freescale.train.torch_files.tensor_writer import TensorWriter
from freescale.transport.local import LocalTransport

_STATIC = 4  # entries about a table that is not dynamic
_OF_DELTAS = ("parent", "changed", "files")  # not in a full checkpoint, or written anew


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a folder."""

    step: int
    parent: int | None  # of a delta: the step whose changes it holds
    bytes: int  # of its own files
    saved: float  # seconds since 1970
    ranks: int
    best: bool
    problem: str = ""  # what is wrong with it, if that was checked


def list_checkpoints(folder: Path, verify: bool = False) -> Iterator[Entry]:
    """The checkpoints in `folder`, in the order of their steps. `verify` reads all their files."""
    files, transport = open_folder(folder), LocalTransport()
    steps = files.steps()
    best = _find_best(files)
    known: Known = {}
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
            (path / "state.json").stat().st_mtime,
            int(state.get("ranks", 0)),
            step == best,
            problem,
        )


def _find_best(files: CheckpointFolder) -> int | None:
    """The best one, as named by the last one that can be read."""
    states = map(files.read, reversed(files.steps()))
    return next((find_best_step(state["progress"]) for state in states if state), None)


def compact_last(folder: Path) -> tuple[Path, list[int]]:
    """Makes the last checkpoint, a delta, a full one, and removes what only it depended on, in a
    folder that no run uses. The full one replaces the delta when it is complete; a kill leaves one
    of the two. Needs host memory for a full checkpoint, but no model. Returns the checkpoint, and
    the steps that were removed. ValueError if there is no checkpoint, or the chain is damaged or
    cannot be written."""
    files, transport = open_folder(folder), LocalTransport()
    steps = files.steps()
    if not steps:
        raise ValueError(f"{folder} holds no checkpoint: name the folder of a run")
    found = verify_checkpoint(files.path(steps[-1]), transport)
    if not found.ancestors:
        return found.path, []
    tensors = _read_whole(found)
    state = {key: value for key, value in found.state.items() if key not in _OF_DELTAS}
    state["format"] = FORMAT
    # was finite when it was saved, except what may be infinite
    contents = DiskContents(tensors=tensors, state=state, untrained=set(tensors))
    write_checkpoint(files, contents, transport, TensorWriter())
    parents, best = files.parents(), _find_best(files)
    chain = {int(link.state["progress"]["step"]) for link in found.ancestors}
    others = [step for step in parents if step not in chain or step == best]
    removed = sorted(chain - find_needed(parents, others))
    files.remove(removed)
    files.close()
    return files.path(steps[-1]), removed


def _read_whole(found: Intact) -> dict[str, Tensor]:
    """All tensors of a full checkpoint of the same state."""
    own = read_tensors(SafeReader(found.path), lambda name: not name.startswith("changed/"))
    tables = read_tensors(SafeReader(found.base.path), lambda name: name.startswith("table/"))
    for name, parts in group_tables(tables).items():
        rows, *description = found.state["tables"][name]
        if len(description) >= _STATIC:  # a dynamic table is [virtual shards, rows of each, ...]
            parts = {part: value.flatten(0, 1) for part, value in parts.items()}
        apply_deltas(found.deltas, {name: TablePart(0, int(rows), parts)})
    return own | tables
