"""What the public DlrmHSTU needs of TorchRec and fbgemm, for machines without them: with rows as
inputs, three operations."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from freescale.batch import compute_offsets

_KEPT: list[Any] = []  # an operation ends with its library


def stand_in_for_torchrec() -> None:
    """Without TorchRec: defines the names that the package imports from it, and fbgemm's operations
    in plain torch."""
    if _KEPT or importlib.util.find_spec("torchrec") is not None:
        return
    names = {
        "torchrec": "KeyedJaggedTensor",
        "torchrec.sparse.jagged_tensor": "KeyedJaggedTensor",
        "torchrec.modules.embedding_configs": "EmbeddingConfig",
        "torchrec.modules.embedding_modules": "EmbeddingCollection",
    }
    for module in ("torchrec.modules", "torchrec.sparse"):
        sys.modules[module] = ModuleType(module)
    for module, name in names.items():
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], name, type(name, (), {}))
    make: Any = torch.library.Library
    library = make("fbgemm", "DEF")
    _KEPT.append(library)
    library.define("asynchronous_complete_cumsum(Tensor t_in) -> Tensor")
    library.define(
        "jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, "
        "float padding_value=0) -> Tensor"
    )
    library.define("dense_to_jagged(Tensor dense, Tensor[] x_offsets, SymInt? total_L=None) -> "
                   "(Tensor, Tensor[])")  # fmt: skip
    for function in (asynchronous_complete_cumsum, jagged_to_padded_dense, dense_to_jagged):
        library.impl(function.__name__, function, "CompositeImplicitAutograd")


def asynchronous_complete_cumsum(t_in: Tensor) -> Tensor:
    return compute_offsets(t_in)


def jagged_to_padded_dense(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0
) -> Tensor:
    lengths, (longest,) = offsets[0].diff(), max_lengths
    place = torch.arange(longest, device=values.device)
    there = place < lengths[:, None]
    found = values[torch.where(there, offsets[0][:-1, None] + place, 0)]
    return torch.where(there.view(*there.shape, *[1] * (values.ndim - 1)), found, padding_value)


def dense_to_jagged(
    dense: Tensor, x_offsets: list[Tensor], total_L: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    there = torch.arange(dense.shape[1], device=dense.device) < x_offsets[0].diff()[:, None]
    return dense[there], x_offsets
