"""Samples as bytes, for an AllToAll: every feature of a batch, whatever its dtype, in one message
per destination.

All happens on the host, which has the batches and their lengths: no device is waited for. Names,
dtypes and trailing shapes are not sent, every rank has the same features; sizes travel separately,
so that unpacking need not read the message. What a batch shares travels with every part that has
samples: a rank that had no data gets it with its first ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from freescale.batch import Jagged, Nested, SequenceBatch

_FOREIGN = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_SHARED = "Shared"  # kind of a feature in a schema
# mean values per sample from which ranges are copied straight into the message; shorter ones are
# faster by index, with two copies
_LONG = 256
_ALIGNMENT = 8  # bytes; aligned tensors can be viewed in their dtype


def pack(
    batch: SequenceBatch, order: np.ndarray, counts: Sequence[int]
) -> tuple[Tensor, np.ndarray, list[int]]:
    """The samples at `order` (of a batch on the host), cut into parts of `counts` samples.

    Returns the bytes of all parts, one after another; the leading size of each tensor in each part
    [parts, tensors]; and the bytes of each part.
    """
    edges = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])
    columns = [
        (rows, ends[:-1], ends[1:])
        for part in batch.parts().values()
        for rows, ends in _select_rows(part, order, edges)
    ]
    whole = [np.ascontiguousarray(_view_as_numpy(tensor)) for tensor in batch.list_shared()]
    nothing, some = np.zeros(len(counts), np.int64), edges[1:] > edges[:-1]
    columns += [(rows, nothing, len(rows) * some) for rows in whole]
    sizes = np.zeros((len(counts), len(columns)), np.int64)
    pieces: list[np.ndarray] = []
    bytes_of_part = [0] * len(counts)
    for part in range(len(counts)):
        for number, (rows, begins, ends) in enumerate(columns):
            first, last = int(begins[part]), int(ends[part])
            if last == first:
                continue
            sizes[part, number] = last - first
            # rows are a fresh copy, or the batch's own: contiguous
            found = rows.of_part(part) if isinstance(rows, _Ranges) else [rows[first:last]]
            found = [piece.reshape(-1).view(np.uint8) for piece in found]
            pieces += found
            size = sum(piece.size for piece in found)
            padding = -size % _ALIGNMENT
            if padding:
                pieces.append(np.zeros(padding, np.uint8))
            bytes_of_part[part] += size + padding
    joined = np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
    return torch.from_numpy(joined), sizes, bytes_of_part


def unpack(like: SequenceBatch, message: Tensor, sizes: np.ndarray) -> SequenceBatch:
    """A batch like `like` with the samples in `message` (uint8), parts of `sizes` [parts,
    tensors]."""
    tensors = like.tensors()
    if sizes.ndim != 2 or sizes.shape[1] != len(tensors):
        raise ValueError(f"sizes of {sizes.shape[1:]} tensors do not fit a batch of {len(tensors)}")
    bytes_each = sizes * np.array([_count_row_bytes(tensor) for tensor in tensors], np.int64)
    padded = -(-bytes_each // _ALIGNMENT) * _ALIGNMENT
    if message.dtype != torch.uint8 or int(padded.sum()) != message.numel() or (sizes < 0).any():
        raise ValueError(
            f"{message.numel()} bytes of {message.dtype} came, {int(padded.sum())} "
            "of uint8 were announced"
        )
    starts = (np.cumsum(padded.reshape(-1)) - padded.reshape(-1)).reshape(padded.shape)
    source = message.numpy()  # numpy is faster for many small calls
    rebuilt: list[Tensor] = []
    columns = zip(tensors, sizes.T.tolist(), starts.T.tolist(), bytes_each.T.tolist(), strict=True)
    split = len(tensors) - len(like.shared)
    for number, (tensor, counts, places, lengths) in enumerate(columns):
        pieces = [
            source[start : start + length]
            for start, length in zip(places, lengths, strict=True)
            if length
        ]
        rows = sum(counts)
        if number >= split:  # shared: each part has all of it; not needed without samples
            pieces, rows = pieces[:1], max(counts, default=0)
            if not pieces:
                rebuilt.append(tensor)
                continue
        shape = (rows, *tensor.shape[1:])
        if pieces:
            rebuilt.append(torch.frombuffer(np.concatenate(pieces), dtype=tensor.dtype).view(shape))
        else:
            rebuilt.append(torch.empty(shape, dtype=tensor.dtype))
    return like.with_tensors(rebuilt)


def describe_schema(batch: SequenceBatch) -> str:
    """Names, kinds, dtypes and trailing shapes of a batch's features; empty if it has none."""
    columns = [
        (name, type(part).__name__, values.dtype, values.shape[1:])
        for name, part in batch.parts().items()
        for values in [part if isinstance(part, Tensor) else part.values]
    ]
    for name, tensor in zip(sorted(batch.shared), batch.list_shared(), strict=True):
        columns.append((f"x/{name}", _SHARED, tensor.dtype, tensor.shape))
    return _write_schema(tuple(columns))


@lru_cache(maxsize=64)  # batches have the same features
def _write_schema(columns: tuple[tuple[str, str, torch.dtype, torch.Size], ...]) -> str:
    written = [
        [name, kind, str(dtype).removeprefix("torch."), list(shape)]
        for name, kind, dtype, shape in columns
    ]
    return json.dumps(written) if written else ""


def build_empty_batch(schema: str) -> SequenceBatch:
    """An empty batch with the features of a schema. Shared features are zero: samples bring
    theirs."""
    parts: dict[str, Jagged | Nested | Tensor] = {}
    shared: dict[str, Tensor] = {}
    none = torch.zeros(0, dtype=torch.int64)
    for name, kind, dtype, shape in json.loads(schema) if schema else []:
        if kind == _SHARED:
            shared[name[2:]] = torch.zeros(shape, dtype=getattr(torch, dtype))
            continue
        values = torch.zeros(0, *shape, dtype=getattr(torch, dtype))
        parts[name] = (
            Jagged(values, none)
            if kind == "Jagged"
            else Nested(values, none, none)
            if kind == "Nested"
            else values
        )
    return SequenceBatch(shared=shared).with_parts(parts)


def _count_row_bytes(tensor: Tensor) -> int:
    return torch.Size(tensor.shape[1:]).numel() * tensor.element_size()


def _view_as_numpy(tensor: Tensor) -> np.ndarray:
    """The values of a host tensor; dtypes unknown to numpy as integers of equal width."""
    if tensor.dtype in _FOREIGN:
        tensor = tensor.view(_FOREIGN[tensor.dtype])
    return tensor.numpy()


@dataclass(frozen=True)
class _Ranges:
    """Values of samples, not copied yet: those of sample i are values[begins[i]:ends[i]]."""

    values: np.ndarray
    begins: list[int]
    ends: list[int]
    edges: list[int]  # of the parts, in samples

    def of_part(self, part: int) -> list[np.ndarray]:
        samples = range(self.edges[part], self.edges[part + 1])
        return [self.values[self.begins[i] : self.ends[i]] for i in samples]


def _select_rows(
    part: Jagged | Nested | Tensor, order: np.ndarray, edges: np.ndarray
) -> list[tuple[np.ndarray | _Ranges, np.ndarray]]:
    """The tensors of a column for the samples at `order`, each with its own edges of the parts."""
    if isinstance(part, Tensor):
        return [(_view_as_numpy(part)[order], edges)]
    if isinstance(part, Jagged):
        values, lengths = _view_as_numpy(part.values), part.lengths.numpy()
        if values.shape[0] >= _LONG * max(1, len(order)):
            chosen, last = lengths[order], np.cumsum(lengths)[order]
            ranges = _Ranges(values, (last - chosen).tolist(), last.tolist(), edges.tolist())
            return [(chosen, edges), (ranges, np.concatenate([[0], np.cumsum(chosen)])[edges])]
        index, chosen, ends = _select_ranges(lengths, order)
        return [(chosen, edges), (values[index], ends[edges])]
    index, counts, ends = _select_ranges(part.counts.numpy(), order)
    inner, lengths, inner_ends = _select_ranges(part.lengths.numpy(), index)
    return [
        (counts, edges),
        (lengths, ends[edges]),
        (_view_as_numpy(part.values)[inner], inner_ends[ends[edges]]),
    ]


def _select_ranges(
    lengths: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(value indices of the samples at `order`, their lengths, offsets [n + 1])."""
    starts = np.cumsum(lengths) - lengths
    chosen = lengths[order]
    ends = np.concatenate([[0], np.cumsum(chosen)])
    return np.repeat(starts[order] - ends[:-1], chosen) + np.arange(ends[-1]), chosen, ends
