"""Nested values as JSON and named tensors, so that nothing has to be pickled.

{"step": 3, "sums": [tensor, tensor]}
->  {"dict": [["step", 3], ["sums", {"list": [{"tensor": "a/sums/0"}, ...]}]]}
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON; tensors go into `tensors` by names below `name`. ValueError names what is neither a
    tensor nor plain."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ValueError(
                f"{name} is a tensor of layout {value.layout}, which a checkpoint cannot hold"
            )
        if name in tensors:
            raise ValueError(f"two tensors of a checkpoint would have the name {name}")
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or (
        isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)
    ):
        return value
    if type(value) in (list, tuple):
        return {
            type(value).__name__: [
                pack(inner, f"{name}/{place}", tensors) for place, inner in enumerate(value)
            ]
        }
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {
            "dict": [[key, pack(inner, f"{name}/{key}", tensors)] for key, inner in value.items()]
        }
    raise ValueError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it holds tensors, "
        "numbers, text, None, and lists, "
        "tuples and dicts of them"
    )


class Unpacker:
    """Makes packed values again, with empty tensors of the shapes and types that a checkpoint has.
    They are collected in `tensors`, to be read into."""

    def __init__(self, state: Mapping[str, Any], metadata: Metadata, device: torch.device) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.metadata, self._device = metadata, device
        self._on_host = set(state["on_host"]) if "on_host" in state else None

    def unpack(
        self, packed: Any, device: torch.device | None = None, never_on_host: bool = False
    ) -> Any:
        """The value that was packed, with tensors still to be filled: on `device`, or on the host
        if they were. A checkpoint from a CPU does not say: single numbers are on the host, where
        torch's optimizers keep them unless capturable or fused."""
        if not isinstance(packed, dict):
            return packed
        ((kind, inner),) = packed.items()
        if kind == "tensor":
            return self._tensor(inner, device or self._device, never_on_host)
        if kind == "dict":
            return {key: self.unpack(value, device, never_on_host) for key, value in inner}
        values = [self.unpack(value, device, never_on_host) for value in inner]
        return tuple(values) if kind == "tuple" else values

    def _tensor(self, name: str, device: torch.device, never_on_host: bool) -> Tensor:
        entry = self.metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"the checkpoint has no tensor {name}, which its state.json names")
        host = name in self._on_host if self._on_host is not None else not entry.size
        where = torch.device("cpu") if host and not never_on_host else device
        self.tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device=where)
        return self.tensors[name]
