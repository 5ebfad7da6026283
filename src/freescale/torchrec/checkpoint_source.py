"""Sources of a checkpoint, read piece by piece: a folder of torch.distributed.checkpoint, or a
state_dict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from freescale.train.torch_files.safe_reader import SafeReader

# takes a piece [...] of a tensor that begins at the offsets
Take = Callable[[Tensor, Sequence[int]], None]


class Source(Protocol):
    """Named tensors."""

    about: str
    shapes: Mapping[str, Sequence[int]]

    def read(self, wanted: Mapping[str, Take]) -> None:
        """Passes each wanted tensor to its receiver, in pieces."""


def open_source(source: str | Path | Mapping[str, Any]) -> Source:
    """Opens a folder of torch.distributed.checkpoint, a file of torch.save, or its content. OSError
    or ValueError if it cannot be read."""
    if isinstance(source, Mapping):
        return _StateDict("the state_dict", source)
    path = Path(source)
    if path.is_dir():
        return _Folder(path)
    # mapped: ranks of one machine share what they read of it
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, no state_dict")
    return _StateDict(f"{path}", loaded)


class _StateDict:
    """A state_dict, within others or not."""

    def __init__(self, about: str, state: Mapping[str, Any]) -> None:
        self.about = about
        self._tensors = dict(_flatten(state))
        self.shapes: Mapping[str, Sequence[int]] = {
            name: tensor.shape for name, tensor in self._tensors.items()
        }

    def read(self, wanted: Mapping[str, Take]) -> None:
        for name, take in wanted.items():
            tensor = self._tensors[name]
            take(tensor.detach(), [0] * tensor.dim())


def _flatten(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}.")
        elif hasattr(value, "local_shards") or hasattr(value, "to_local"):
            raise ValueError(
                f"{path!r} of the state_dict is a {type(value).__name__}, and a rank has only a "
                "part of it: save it by torch.distributed.checkpoint, and give the folder"
            )
        elif isinstance(value, Tensor):
            yield path, value


class _Reader(SafeReader):
    """Skips entries that are not tensors."""

    def _check(self, metadata: Any) -> None:
        if type(metadata) is meta.Metadata:
            entries = metadata.state_dict_metadata
            other = [
                name for name, entry in entries.items() if type(entry) is meta.BytesStorageMetadata
            ]
            for name in other:
                del entries[name]
        super()._check(metadata)


class _Folder:
    """A checkpoint of torch.distributed.checkpoint, read one shard at a time."""

    def __init__(self, path: Path) -> None:
        self.about = f"checkpoint {path}"
        self._reader = _Reader(path)
        self._metadata = self._reader.read_metadata()
        entries: dict[str, Any] = self._metadata.state_dict_metadata  # tensors alone
        self.shapes: Mapping[str, Sequence[int]] = {name: e.size for name, e in entries.items()}
        self._entries = entries

    def read(self, wanted: Mapping[str, Take]) -> None:
        items = []
        for name in wanted:
            entry = self._entries[name]
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise ValueError(f"it holds {name!r} in parts")
            for number, chunk in enumerate(entry.chunks):
                index = meta.MetadataIndex(name, chunk.offsets, number)
                start = torch.Size([0] * len(chunk.sizes))
                items.append(ReadItem(LoadItemType.TENSOR, index, start, index, start, chunk.sizes))
        planner = _Planner(wanted, {name: self._entries[name].properties.dtype for name in wanted})
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._reader.read_data(LoadPlan(items), planner).wait()


class _Planner(DefaultLoadPlanner):
    """Hands over each piece as it is read."""

    def __init__(self, wanted: Mapping[str, Take], dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self._wanted, self._dtypes = wanted, dtypes

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return torch.empty(read_item.lengths, dtype=self._dtypes[read_item.dest_index.fqn])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        offset = read_item.dest_index.offset
        assert offset is not None
        self._wanted[read_item.dest_index.fqn](tensor, list(offset))
