"""The checkpoints of a run: saved and loaded by all ranks together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freescale.embedding.collection import Tables
from freescale.embedding.swap import Parallel
from freescale.pipeline.reducer import Reducer
from freescale.train.checkpoint.carried import Carried
from freescale.train.checkpoint.files import (
    FORMAT,
    CheckpointFolder,
    Intact,
    checksum,
    intact,
    last_intact,
    read_state,
    step_of,
    write_state,
)
from freescale.train.checkpoint.safe import SafeReader
from freescale.train.checkpoint.together import Writer, checkpointing, reason, together
from freescale.transport.api import Transport
from freescale.transport.collective import Collective


@dataclass
class Checkpoints:
    """The checkpoints of a run's folder. `save`, `load` and `last_intact` are collectives.

    A folder holds one run. Steps ahead of the one that is saved are refused: they are another run's. Who goes back to an earlier
    checkpoint, by loading it with its optimizer, leaves the later ones behind: the next save removes them.
    """

    folder: Path
    transport: Transport
    keep: int = 2
    _left_behind: set[int] = field(default_factory=set, init=False, repr=False)  # rank 0's

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")
        self.files = CheckpointFolder(Path(self.folder))

    # ---- which there are

    def steps(self) -> list[int]:
        return self.files.steps()

    def path(self, step: int) -> Path:
        return self.files.path(step)

    def latest(self) -> Path | None:
        """By its name; whether its files are as they were written, `last_intact` finds out."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def last_intact(self) -> Intact | None:
        """The last checkpoint, for `load`; if it is damaged, the one before, with a warning."""
        return last_intact(self.folder, self.transport)

    # ---- save

    def save(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        reducer: Reducer | None = None,
    ) -> Path:
        """`progress` is plain JSON with at least `step`: where the run stands. `reducer` is the pipeline's (`pipeline.buckets`):
        one that compresses carries errors from step to step."""
        step = int(progress["step"])
        self._together(lambda: self._refuse_ahead(step))
        parallel.tables.settle()
        tensors = _tensors(parallel, optimizer, self.transport)
        carried = Carried(reducer, _names(parallel))
        tensors |= carried.tensors(self.transport.rank)
        state = _description(parallel, optimizer) | {"progress": dict(progress)}
        state |= {"ranks": self.transport.world, "device": self.transport.device.type}
        state |= {"carried": carried.names} if carried.names else {}
        failure = f"checkpoint {self.path(step)} could not be written"
        try:
            self._together(lambda: self.files.begin(step), failure)
            self._write(self.files.writing(step), tensors, state, failure)
            self._together(lambda: self.files.finish(step), failure)
        except ValueError:  # all ranks are here, none writes any more
            if self.transport.rank == 0:
                self.files.clear()
            raise
        self._together(lambda: self._remove_old(step))
        return self.path(step)

    def _write(self, folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], failure: str) -> None:
        rank = self.transport.rank
        with checkpointing(failure):
            dcp.save(tensors, storage_writer=Writer(folder, overwrite=True), **self._coordination())

        def sums() -> dict[str, list[int]]:
            mine = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
            return {path.name: checksum(path) for path in mine}

        said = together(self.transport, sums)
        files = [json.loads(part) for part in self.transport.gather_bytes(json.dumps(said).encode())]
        state["files"] = {name: sum_of for part in files for name, sum_of in part.items()}
        self._together(lambda: write_state(folder, state), failure)

    def _together(self, work: Callable[[], object], failure: str = "") -> None:
        """Rank 0's work; if it fails, all ranks say so."""

        def done() -> None:
            try:
                if self.transport.rank == 0:
                    work()
            except OSError as error:
                raise ValueError(f"{failure}: {reason(error)}") from error

        together(self.transport, done)

    def _refuse_ahead(self, step: int) -> None:
        ahead = [self.path(found).name for found in self.steps() if found > step and found not in self._left_behind]
        if ahead:
            raise ValueError(
                f"{self.folder} holds checkpoints ahead of step {step} ({', '.join(ahead)}), which this run did not come from: "
                "go on from one of them (load it; --resume), remove them, or use another folder"
            )

    def _remove_old(self, step: int) -> None:
        """Those left behind, and all but the last `keep`; never the one just saved."""
        others = [found for found in self.steps() if found != step]
        old = [found for found in others if found not in self._left_behind]
        self.files.remove([found for found in others if found in self._left_behind] + old[: max(0, len(old) - self.keep + 1)])
        self._left_behind.clear()

    # ---- load

    read_state = staticmethod(read_state)

    def load(
        self,
        checkpoint: Path | Intact,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer | None = None,
        reducer: Reducer | None = None,
    ) -> dict:
        """Restores tables, dense weights and (if given) optimizer state and random state; returns the progress. An optimizer's
        settings (learning rate, weight decay, ...) stay the caller's: they may have changed on purpose. Errors of compression go to
        the pipeline's `reducer`; where its state was not saved it begins with none, where it is exact they are left."""
        found = checkpoint if isinstance(checkpoint, Intact) else intact(Path(checkpoint), self.transport)
        path, state = found.path, found.state
        if not parallel.tables.placed:
            parallel.tables.place(recorded=state["placement"])
        _refuse_other_model(path, state, _description(parallel, optimizer))
        tensors = _tensors(parallel, optimizer, self.transport, random=optimizer is not None)
        same_ranks = state["ranks"] == self.transport.world and state["device"] == self.transport.device.type
        if not same_ranks:  # other ranks or devices have other random states; each rank keeps its own
            tensors = {name: value for name, value in tensors.items() if not name.startswith("random/")}
        carried = Carried(reducer, _names(parallel))
        tensors |= carried.room(state.get("carried", ()), self.transport.rank, self.transport.world, state["ranks"])
        with checkpointing(f"checkpoint {path} could not be read"):
            dcp.load(tensors, storage_reader=SafeReader(path), **self._coordination())
        if optimizer is not None and same_ranks:
            _restore_random(tensors, self.transport)
        carried.restore(same_ranks=state["ranks"] == self.transport.world)
        if optimizer is not None and self.transport.rank == 0:
            self._leave_behind(path)
        return state["progress"]

    def _leave_behind(self, path: Path) -> None:
        step = step_of(path)
        if step is None or path.resolve().parent != self.folder.resolve():
            return
        self._left_behind = {found for found in self.steps() if found > step}
        if self._left_behind:
            names = ", ".join(self.path(found).name for found in sorted(self._left_behind))
            warnings.warn(f"going on from {path.name}: {names} will be removed when the next checkpoint is saved", stacklevel=3)

    def _coordination(self) -> dict[str, Any]:
        if isinstance(self.transport, Collective):
            return {"process_group": self.transport.control}
        return {"no_dist": True}


def _tensors(
    parallel: Parallel, optimizer: torch.optim.Optimizer | None, transport: Transport, random: bool = True
) -> dict[str, Tensor]:
    """Everything as named tensors that share memory with the originals: saved from, loaded into."""
    tensors: dict[str, Tensor] = {}
    for name, value in parallel.module.state_dict(keep_vars=True).items():
        tensors[f"dense/{name}"] = value.detach()
    for name in parallel.tables.specs:
        for part, value in parallel.tables.local(name).items():
            tensors[f"table/{name}/{part}"] = _whole(value, name, parallel.tables, transport)
    if optimizer is not None:
        for name, entries in _optimizer_state(parallel, optimizer).items():
            for key, value in entries.items():
                tensors[f"optimizer/{name}/{key}"] = value
    if random:
        tensors[f"random/{transport.rank}/cpu"] = torch.get_rng_state()
        if transport.device.type == "cuda":
            tensors[f"random/{transport.rank}/cuda"] = torch.cuda.get_rng_state(transport.device)
    return tensors


def _whole(local: Tensor, name: str, tables: Tables, transport: Transport) -> Tensor:
    """A rank's part of a table as torch's sharded tensor; a replicated table is a plain tensor of the same name and shape."""
    if tables.placements[name].kind == "replicated" or not isinstance(transport, Collective):
        return local
    device = transport.device.type
    group = transport.group if device == "cuda" else transport.control
    mesh = DeviceMesh.from_group(group, device)
    shape = torch.Size((tables.specs[name].rows, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _names(parallel: Parallel) -> dict[int, str]:
    return {id(parameter): name for name, parameter in parallel.module.named_parameters()}


def _optimizer_state(parallel: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """State by parameter name. Made if the optimizer has not stepped yet, so that a load has tensors to fill."""
    names = _names(parallel)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not optimizer.state:
        _make_state(optimizer, parameters)
    result: dict[str, dict[str, Tensor]] = {}
    for parameter in parameters:
        entries = optimizer.state.get(parameter, {})
        result[names[id(parameter)]] = {k: v for k, v in entries.items() if isinstance(v, Tensor)}
    return result


def _make_state(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """One step with zero gradients and zero learning rate: fills in the state, changes no parameter."""
    saved = [(p, p.grad) for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in saved:
        parameter.grad = gradient
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, Tensor):
                value.zero_()


def _restore_random(tensors: Mapping[str, Tensor], transport: Transport) -> None:
    torch.set_rng_state(tensors[f"random/{transport.rank}/cpu"])
    if transport.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"random/{transport.rank}/cuda"], transport.device)


def _description(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> dict:
    """What a checkpoint says of the model, so that another model is refused before anything is read."""
    tables = parallel.tables
    return {
        "format": FORMAT,
        "dense": {n: [list(v.shape), str(v.dtype)] for n, v in parallel.module.state_dict().items()},
        "tables": {
            name: [spec.rows, spec.width, str(spec.dtype), tables.optimizers[name].name] for name, spec in tables.specs.items()
        },
        "placement": {name: placement.kind for name, placement in tables.placements.items()},
        "optimizer": type(optimizer).__name__ if optimizer is not None else None,
    }


def _refuse_other_model(path: Path, saved: Mapping, here: Mapping) -> None:
    for part in ("tables", "dense"):
        for name in sorted(set(saved[part]) | set(here[part])):
            there, now = saved[part].get(name), here[part].get(name)
            if there != now:
                what = "table" if part == "tables" else "parameter"
                raise ValueError(
                    f"{path} is a checkpoint of another model: {what} {name!r} is {there or 'absent'} there, {now or 'absent'} here"
                )
    if here["optimizer"] is not None and saved["optimizer"] != here["optimizer"]:
        raise ValueError(f"{path} was trained with {saved['optimizer']}, not {here['optimizer']}: use the same dense optimizer")
