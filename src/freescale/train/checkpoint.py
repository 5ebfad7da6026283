"""Checkpoints with torch.distributed.checkpoint: independent of ranks and placement, atomic, free of pickled code.

A checkpoint is a folder `step-00000100` with torch's sharded tensor files and `state.json`. It is written under a temporary
name and renamed when every rank has finished, so that a killed save never spoils an earlier one. Tables are stored whole in
spread order (embedding/layout.py), dense parameters and optimizer state by parameter name.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from freescale.config import TrainConfig
from freescale.embedding.collection import Tables
from freescale.embedding.swap import Parallel
from freescale.pipeline.reducer import Reducer
from freescale.train.carried import Carried
from freescale.transport.api import Transport
from freescale.transport.collective import Collective

_FORMAT = 1

# What torch's checkpoint metadata consists of. Nothing else is ever constructed while a checkpoint is read.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "StorageMeta",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise ValueError(f"the checkpoint's metadata holds {module}.{name}, which no checkpoint of ours does: refused")
        return super().find_class(module, name)


class SafeReader(dcp.FileSystemReader):
    """torch's reader, except that its metadata can build nothing but metadata and its files stay in their folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"the checkpoint {self.path} has no metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"entry {name!r} of checkpoint {self.path} is not a tensor: refused")
        for info in (metadata.storage_data or {}).values():
            if PurePosixPath(info.relative_path).name != info.relative_path:
                raise ValueError(f"checkpoint {self.path} points to a file outside it ({info.relative_path}): refused")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


@dataclass
class Checkpoints:
    """The checkpoints of a run's folder. `save` and `load` are collectives."""

    folder: Path
    transport: Transport
    keep: int = TrainConfig.keep_checkpoints

    # ---- which there are

    def steps(self) -> list[int]:
        found = self.folder.glob("step-*") if self.folder.is_dir() else []
        return sorted(int(path.name[5:]) for path in found if (path / "state.json").exists())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

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
        final, temporary = self.path(step), self.folder / f".writing-{step:08d}"
        if self.transport.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".writing-*"):
                shutil.rmtree(leftover)
            temporary.mkdir()
        self._barrier()
        parallel.tables.settle()
        tensors = _tensors(parallel, optimizer, self.transport)
        carried = Carried(reducer, _names(parallel))
        tensors |= carried.tensors(self.transport.rank)
        writer = dcp.FileSystemWriter(temporary, overwrite=True)
        with checkpointing(f"checkpoint {final} could not be written"):
            dcp.save(tensors, storage_writer=writer, **self._coordination())
        if self.transport.rank == 0:
            state = _description(parallel, optimizer) | {"progress": dict(progress)}
            state |= {"ranks": self.transport.world, "device": self.transport.device.type}
            state |= {"carried": carried.names} if carried.names else {}
            with open(temporary / "state.json", "w", encoding="utf-8") as file:
                json.dump(state, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            _sync_folder(self.folder)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old))
        self._barrier()
        return final

    # ---- load

    @staticmethod
    def read_state(path: Path) -> dict:
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path} is not a checkpoint: it has no state.json") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}/state.json is damaged ({error}): use an earlier checkpoint") from None
        if state.get("format") != _FORMAT:
            raise ValueError(f"{path} has checkpoint format {state.get('format')}, this version reads {_FORMAT}")
        return state

    def load(
        self,
        path: Path,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer | None = None,
        reducer: Reducer | None = None,
    ) -> dict:
        """Restores tables, dense weights and (if given) optimizer state and random state; returns the progress. An optimizer's
        settings (learning rate, weight decay, ...) stay the caller's: they may have changed on purpose. Errors of compression go to
        the pipeline's `reducer`; where its state was not saved it begins with none, where it is exact they are left."""
        state = self.read_state(path)
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
        return state["progress"]

    def _coordination(self) -> dict[str, Any]:
        if isinstance(self.transport, Collective):
            return {"process_group": self.transport.control}
        return {"no_dist": True}

    def _barrier(self) -> None:
        self.transport.gather_bytes(b"")


@contextmanager
def checkpointing(failure: str) -> Iterator[None]:
    """Around torch's save and load: what fails on any rank is one line on all. A single process is no accident here, so that
    torch need not warn about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.api.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise ValueError(f"{failure}: {first}") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        "format": _FORMAT,
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
