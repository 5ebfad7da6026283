"""Reads checkpoints without executing anything: torch's metadata is a pickle, which could build and
call anything.

Only the classes of torch's metadata may be built, with the fields that they have, and only the few
functions that pickle their values may be called. Everything else is refused before it happens.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import _get_layout

from freescale.stores.path import as_path
from freescale.transport.api import Transport
from freescale.transport.failures import describe_error
from freescale.transport.process_group import ProcessGroupTransport

# Built empty, then given their fields.
_RECORDS: tuple[type, ...] = (
    meta.Metadata,
    meta.StorageMeta,
    meta.TensorStorageMetadata,
    meta.BytesStorageMetadata,
    meta.TensorProperties,
    meta.ChunkStorageMetadata,
    meta.MetadataIndex,
    _StorageInfo,
)
_FIELDS = {record: {field.name for field in fields(record)} for record in _RECORDS}
_CALLED = (meta._MEM_FORMAT_ENCODING, _get_layout, torch.Size, PurePosixPath)
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
# By the names under which they are pickled. Paths become PurePosixPath, whichever module this
# version of Python has them in.
_KNOWN: dict[tuple[str, str], Any] = {
    (value.__module__, value.__name__): value for value in (*_RECORDS, meta._MEM_FORMAT_ENCODING)
}
_KNOWN |= {("torch.serialization", "_get_layout"): _get_layout, ("torch", "Size"): torch.Size}
_KNOWN |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES}
_KNOWN |= {
    (module, name): PurePosixPath
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "Path")
}


class _Refused(ValueError):
    pass


def _refuse(what: str) -> NoReturn:
    raise _Refused(f"the checkpoint's metadata {what}, which no checkpoint of ours does: refused")


class _MetadataUnpickler(pickle._Unpickler):
    """The interpreter's unpickler in Python, whose opcodes can be replaced one by one."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    append: Callable[[Any], None]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            _refuse(f"holds {module}.{name}")
        return _KNOWN[module, name]

    def get_extension(self, code: int) -> NoReturn:
        _refuse(f"holds extension {code}")

    def persistent_load(self, pid: Any) -> NoReturn:
        _refuse(f"refers to {pid!r}")

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not any(function is known for known in _CALLED):
            _refuse(f"calls {function!r}")
        self.append(function(*arguments))

    def load_newobj(self) -> None:
        arguments, record = self.stack.pop(), self.stack.pop()
        if (
            not any(record is known for known in _RECORDS)
            or type(arguments) is not tuple
            or arguments
        ):
            _refuse(f"makes {record!r}")
        self.append(record.__new__(record))

    def load_newobj_ex(self) -> None:
        _refuse("makes objects with named arguments")

    def _instantiate(self, kind: Any, arguments: Any) -> None:
        _refuse(f"makes {kind!r}")

    def load_build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        known = _FIELDS.get(type(record))
        if known is None:
            _refuse(f"sets attributes of {record!r}")
        if type(record) is meta.TensorProperties:  # torch encodes its memory format
            if type(state) is not tuple or len(state) != len(known):
                _refuse(f"sets properties of a tensor by {state!r}")
            record.__setstate__(state)  # type: ignore[no-untyped-call]
            return
        if type(state) is not dict or not known.issuperset(state):
            _refuse(f"sets attributes of a {type(record).__name__} that it does not have")
        vars(record).update(state)

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build


class SafeReader(FileSystemReader):
    """torch's reader, except that its metadata can build nothing but metadata and its files stay in
    their folder."""

    _metadata: meta.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> meta.Metadata:
        if self._metadata is None:
            self._metadata = self._read()
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def list_tensors(self) -> dict[str, Tensor]:
        """Tensors without memory that have the shapes and types of those in the checkpoint."""
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in self.read_metadata().state_dict_metadata.items()
            if isinstance(entry, meta.TensorStorageMetadata)
        }

    def fill(self, tensors: dict[str, Any], transport: Transport | None = None) -> None:
        """Reads tensors, or nested dicts of them, by their names. With a transport a collective, in
        which a failure on any rank is one line on all."""
        how: dict[str, Any] = {"no_dist": True}
        if isinstance(transport, ProcessGroupTransport):
            how = {"process_group": transport.control}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                load(tensors, storage_reader=self, **how)
            except CheckpointException as error:
                first = next(iter(error.failures.values()))[0]
                failure = f"checkpoint {self.path} could not be read"
                raise ValueError(f"{failure}: {describe_error(first)}") from error

    def _read(self) -> meta.Metadata:
        try:
            with (as_path(str(self.path)) / ".metadata").open("rb") as file:
                metadata: meta.Metadata = _MetadataUnpickler(file).load()
            self._check(metadata)
        except (_Refused, OSError):
            raise
        # any other failure of bytes that are not a pickle, or lack fields
        except Exception as error:
            raise ValueError(
                f"the metadata of checkpoint {self.path} is damaged "
                f"({type(error).__name__}: {error})"
            ) from error
        if type(metadata.storage_meta) is not meta.StorageMeta:
            metadata.storage_meta = meta.StorageMeta()
        return metadata

    def _check(self, metadata: Any) -> None:
        if type(metadata) is not meta.Metadata:
            raise _Refused(f"the checkpoint {self.path} has no metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if type(entry) is not meta.TensorStorageMetadata:
                raise _Refused(f"entry {name!r} of checkpoint {self.path} is not a tensor: refused")
        for info in (metadata.storage_data or {}).values():
            if type(info) is not _StorageInfo:
                raise _Refused(
                    f"checkpoint {self.path} says by {info!r} where a tensor is: refused"
                )
            place = info.relative_path
            if type(place) is not str or place == ".." or PurePosixPath(place).name != place:
                raise _Refused(
                    f"checkpoint {self.path} points to a file outside it ({place}): refused"
                )
