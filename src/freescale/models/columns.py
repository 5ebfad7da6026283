"""Reads the columns of a batch that the heads need, and checks that they fit each other; finds the
rows of their ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.kernels.softmax.reference import Negatives, Per


def find_sequence(batch: SequenceBatch, name: str, like: Jagged | None = None) -> Jagged:
    """A sequence of the batch, checked against the lengths of `like`."""
    if name not in batch.sequences:
        raise ValueError(
            f"the batch has no sequence {name!r}; it has "
            f"{', '.join(sorted(batch.sequences)) or 'none'}"
        )
    part = batch.sequences[name]
    if like is None or len(part.values) != len(like.values):
        part.check(name)
    if like is None or part.lengths is like.lengths:
        return part
    own, theirs = part.host_lengths, like.host_lengths
    if not torch.equal(own, theirs):
        part.check(name)
        sample = int((own != theirs).nonzero()[0])
        raise ValueError(
            f"{name!r} has {int(own[sample])} values in sample {sample}, "
            f"what it goes with has {int(theirs[sample])}; they must be equal"
        )
    return part


def measure_time_span(*parts: Jagged) -> int | None:
    """The longest time span of a sample, over all parts; None if the host lacks the times."""
    hosts = [part.host for part in parts if part.host is not None]
    if len(hosts) < len(parts):
        return None
    if len(hosts) == 1 and hosts[0].span is not None:
        return hosts[0].span
    ends = np.iinfo(np.int64)
    low, high = np.full(len(parts[0]), ends.max), np.full(len(parts[0]), ends.min)
    for host in hosts:
        lengths, times = host.lengths.numpy(), host.values.numpy()
        some = lengths > 0
        starts = (np.cumsum(lengths) - lengths)[some]
        if starts.size:
            low[some] = np.minimum(low[some], np.minimum.reduceat(times, starts))
            high[some] = np.maximum(high[some], np.maximum.reduceat(times, starts))
    some = high >= low
    return int((high[some] - low[some]).max(initial=0))


def sum_values(rows: Tensor, of: Jagged) -> Tensor:
    """[values, width] -> [candidates, width]: each candidate's rows, summed in a fixed order."""
    if not rows.shape[0]:
        return torch.cat([rows, rows.new_zeros(len(of), rows.shape[1])])
    # unsafe: skips torch's check on the device; the host has checked the lengths
    return torch.segment_reduce(rows, "sum", lengths=of.lengths, axis=0, initial=0.0, unsafe=True)


def find_candidates(batch: SequenceBatch) -> Nested:
    if "candidates" not in batch.candidates:
        raise ValueError(
            f"the batch has no 'candidates'; it has {', '.join(sorted(batch.candidates)) or 'none'}"
        )
    batch.candidates["candidates"].check("candidates")
    return batch.candidates["candidates"]


def find_negatives(batch: SequenceBatch, like: Jagged) -> Negatives:
    """Negatives as ids, with log-q if present: of samples (dense), of positions (sequences, as long
    as `like`) or of the batch (shared)."""
    name, log_q = "negatives", "negatives_log_q"
    found: tuple[Per, dict[str, Tensor]]
    if name in batch.sequences:
        columns = [n for n in (name, log_q) if n in batch.sequences]
        found = "position", {n: find_sequence(batch, n, like).values for n in columns}
    elif name in batch.shared:
        found = "batch", dict(batch.shared)
    else:
        batch.values(name)  # raises with the names that exist
        found = "sample", dict(batch.dense)
    return Negatives(found[1][name], found[0], found[1].get(log_q))


def locate_rows(table: nn.Module, *ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Finds the rows of ids [...], without copying them if possible.

    `table` is an nn.Embedding, a module with `locate(ids) -> (rows, index)`, or any other that maps
    ids [...] to rows [..., width]. Returns rows [u, width], and for each of the ids their index
    [...] into them; equal ids have equal indices.
    """
    if type(table) is nn.Embedding and is_plain(table):
        return table.weight, list(ids)
    locate: Any = getattr(table, "locate", None)
    if locate is not None and getattr(table, "padding_idx", None) is None:
        found = [locate(part) for part in ids]
        assert all(rows is found[0][0] for rows, _ in found), "a table has one tensor of rows"
        return found[0][0], [index for _, index in found]
    gathered = [table(part) for part in ids]
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in gathered])
    parts = torch.split(
        _find_first(torch.cat([part.reshape(-1) for part in ids])), [part.numel() for part in ids]
    )
    return rows, [index.view(part.shape) for index, part in zip(parts, ids, strict=True)]


def read_rows(table: nn.Module, ids: Tensor) -> Tensor:
    """The rows [..., width] of ids [...] for matrix products: in autocast's dtype, if that is on.

    `table`: as in `locate_rows`, or a module with `read(ids, dtype)`, whose rows need no copy in
    their own dtype.
    """
    kind = ids.device.type
    read: Any = getattr(table, "read", None)
    if read is None or not torch.is_autocast_enabled(kind):
        found: Tensor = table(ids)
    else:
        found = read(ids, torch.get_autocast_dtype(kind))
    return found


def find_log_q(table: nn.Module, ids: Tensor) -> Tensor | None:
    """Log-q [...] of ids [...] if the table counts them, else None."""
    find: Any = getattr(table, "find_log_q", None)
    return None if find is None else find(ids)


def _find_first(ids: Tensor) -> Tensor:
    """ids [n] -> [n]: place of the first equal id, without reading the device."""
    ordered, order = ids.sort(stable=True)
    places = torch.arange(ids.numel(), device=ids.device)
    begins = torch.where(ordered == ordered.roll(1), 0, places)  # where a run of equal ids begins
    begins[:1] = 0
    return torch.empty_like(places).index_copy(0, order, order[begins.cummax(0).values])


def is_plain(table: nn.Embedding) -> bool:
    """Whether its rows are used unchanged and get a dense gradient."""
    return (
        table.padding_idx is None
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not table.sparse
        and not table._forward_hooks
        and not table._forward_pre_hooks
    )
