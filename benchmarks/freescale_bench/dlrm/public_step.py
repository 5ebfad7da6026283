"""Steps of the public DlrmHSTU with its Triton kernels: forward, backward and Adam of everything
but the tables, whose rows are inputs. Runs without TorchRec and fbgemm, of which its kernels need
three operations: plain ones take their place."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from freescale.batch import SequenceBatch, compute_offsets
from freescale_bench.common.results import Row
from freescale_bench.dlrm.measure import ADAM, Data, time_steps
from freescale_bench.dlrm.shapes import TASK, Shape


def measure_public(shape: Shape, data: Sequence[Data], folder: Path, device: str) -> list[Row]:
    if importlib.util.find_spec("torchrec") is None:
        _stand_in()
    from freescale_bench.dlrm.public import build_public

    on_gpu = device == "cuda"
    model = build_public(shape, folder, device=device, bf16=on_gpu, tables=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=on_gpu, **ADAM)
    rows = []
    for each in data:
        windows, more = time_steps(_train(shape, model, optimizer, each, device), on_gpu)
        row = {"arm": "public, without tables", **each.describe(shape, windows), **more}
        rows.append(row)
    return rows


def _train(
    shape: Shape, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, device: str
) -> Iterator[None]:
    from generative_recommenders.modules.dlrm_hstu import SequenceEmbedding

    from freescale_bench.dlrm.public import name_inputs, split_batch

    drawn: dict[int, Tensor] = {}  # rows of as many ids, by number: they are leaves

    def read(lengths: Tensor, count: int) -> Any:
        if count not in drawn:
            drawn[count] = 0.02 * torch.randn(count, shape.width, device=device)
        return SequenceEmbedding(lengths, drawn[count].detach().requires_grad_())

    moved: list[SequenceBatch] = [batch.to(device) for batch in data.batches]
    for batch in (moved[n % len(moved)] for n, _ in enumerate(data.repeat())):
        history, offered = split_batch(shape, batch)
        longest = int(batch.sequences["history"].host_lengths.max())
        lengths, ones = history["item"][1], offered["offered_item"][1]
        read_names, given_names = name_inputs(shape)
        both = {**history, **offered}
        rows = {name: read(both[name][1], len(both[name][0])) for name in read_names}
        payload = {name: both[name][0] for name in given_names}
        payload["uih_offsets"] = compute_offsets(lengths)
        payload["candidate_offsets"] = compute_offsets(ones)
        optimizer.zero_grad(set_to_none=True)
        losses = model.main_forward(rows, payload, longest, lengths, 1, ones)[2]  # type: ignore[operator]
        losses[TASK].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield


def _stand_in() -> None:
    """Names that the package imports from TorchRec, and fbgemm's operations in plain torch."""
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


_KEPT: list[Any] = []  # an operation ends with its library


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
