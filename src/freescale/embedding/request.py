"""What one rank reads of a group of tables in one step, and how it is divided on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.dynamic.draws import SAMPLE
from freescale.embedding.dynamic_rules import DEFAULT_ID, LEARNED
from freescale.embedding.layout import TableSpec, find_feature_ids
from freescale.kernels.dispatch.rows import keeps_gradients, read_rows, sum_by_row
from freescale.kernels.rows.gradients import RowGradients
from freescale.transport.api import Handle

# A batch's ids of one group: (table index within the group, the batch's own tensor of ids).
GroupIds = Sequence[tuple[int, Tensor]]
# gradients [n, width] of served rows -> (unique local rows [u], their summed gradients [u, width])
SumGradients = Callable[[Tensor], tuple[Tensor, Tensor]]


_AT_ONCE = 2  # of `mark_counted`: an id that needs no admission


def collect_ids(batches: Sequence[SequenceBatch], specs: Sequence[TableSpec]) -> GroupIds:
    """The ids that some (micro-)batches hold for the tables of a group."""
    found = [
        (table, ids)
        for table, spec in enumerate(specs)
        for batch in batches
        for _, ids in find_feature_ids(batch, spec)
    ]
    if found and has_default_row(specs[0]):
        # Whatever ids have no row, the one that they read travels like any other.
        found.append((0, torch.full((1,), DEFAULT_ID, device=found[0][1].device)))
    return found


def has_default_row(spec: TableSpec) -> bool:
    """Whether ids without a row read one that is learned. Such a table is alone in its group."""
    return spec.dynamic is not None and spec.dynamic.default == LEARNED


def mark_counted(batches: Sequence[SequenceBatch], spec: TableSpec) -> Tensor | None:
    """[n] uint8, for the ids of `collect_ids` of a dynamic table: 0 for those of negatives, 2 for
    that of a learned default row. None if it has neither, or there are no ids."""
    negatives = spec.dynamic.negatives if spec.dynamic is not None else ()
    parts = [
        torch.full((ids.numel(),), feature not in negatives, dtype=torch.uint8, device=ids.device)
        for batch in batches
        for feature, ids in find_feature_ids(batch, spec)
    ]
    learned = has_default_row(spec)
    if not parts or not (learned or set(negatives) & set(spec.features)):
        return None
    return torch.cat([*parts, *([parts[0].new_full((1,), _AT_ONCE)] if learned else [])])


def mark_draws(batches: Sequence[SequenceBatch], spec: TableSpec) -> Tensor | None:
    """[n] int64, for the ids of `collect_ids` of a dynamic table: what each reading is worth as a
    draw from its sample (dynamic/draws.py). None if the table does not count them, or there are no
    ids."""
    rules = spec.dynamic
    if rules is None or rules.draws is None:
        return None
    parts = []
    for batch in batches:
        for feature, ids in find_feature_ids(batch, spec):
            worth = torch.zeros(ids.numel(), dtype=torch.int64, device=ids.device)
            if feature == rules.draws and feature in batch.sequences:
                lengths = batch.sequences[feature].lengths
                each = SAMPLE // lengths.clamp(min=1)
                worth = torch.repeat_interleave(each, lengths, output_size=ids.numel())
            elif feature == rules.draws:
                worth += SAMPLE
            parts.append(worth)
    if parts and has_default_row(spec):
        parts.append(parts[0].new_zeros(1))
    return torch.cat(parts) if parts else None


class Index:
    """Finds the fetched row of an id: by identity for the tensors of the listed features,
    else by search."""

    def __init__(self, keys: Tensor, given: GroupIds, inverse: Tensor) -> None:
        self.keys = keys  # [u] sorted
        self._read: Tensor | None = None  # [u] which fetched row is read for each; None: its own
        parts = torch.split(inverse, [ids.numel() for _, ids in given])
        self._own = parts
        self._known = [
            (table, ids, ids._version, part)
            for (table, ids), part in zip(given, parts, strict=True)
        ]

    def replace_parts(self, keys: Tensor, inverse: Tensor) -> Index:
        """For the same ids, with other keys."""
        return Index(keys, [(table, ids) for table, ids, *_ in self._known], inverse)

    def redirect(self, missing: Tensor) -> None:
        """missing [u] bool: keys that have no row; the row of the last id that was given is read
        for them."""
        own = torch.arange(len(missing), device=missing.device)
        self._read = torch.where(missing, self._own[-1], own)
        self._known = [
            (table, ids, version, self._read.index_select(0, part))
            for (table, ids, version, _), part in zip(self._known, self._own, strict=True)
        ]

    def find_own(self, table: int, ids: Tensor, keys: Tensor) -> Tensor:
        """Where keys [...] of ids [...] are among those that were fetched, whatever row is read for
        them."""
        known = self.find_known(table, ids)
        if known is not None:
            return self._own[known[0]].view(ids.shape)
        return torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)

    @property
    def parts(self) -> list[Tensor]:
        """Indices of the fetched rows of each tensor of ids that was given."""
        return [part for *_, part in self._known]

    def find_known(self, table: int, ids: Tensor) -> tuple[int, Tensor] | None:
        """(number of the part, indices [...] of the fetched rows of ids [...]); None if the tensor
        is not one of those that were given."""
        for number, (owner, tensor, version, part) in enumerate(self._known):
            if owner != table:  # first: there may be hundreds of features
                continue
            same = tensor is ids or (
                tensor.data_ptr() == ids.data_ptr() and tensor.numel() == ids.numel() > 0
            )
            same = same and tensor.is_contiguous()
            if (
                same
                and ids._version == version
                and ids.is_contiguous()
                and ids.dtype == tensor.dtype
            ):
                return number, part.view(ids.shape)
        return None

    def search(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """keys [...] -> (index of the fetched row, whether it was fetched)."""
        if not self.keys.numel():
            return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
        found = torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)
        there = self.keys[found] == keys
        return found if self._read is None else self._read[found], there


@dataclass(frozen=True)
class RequestPart:
    """Some of a request's rows, and where they travel."""

    # [sum(send)] positions among the rows that this rank requests, by owner; None: all
    requested: Tensor | None
    # [sum(receive)] positions among the rows requested from this rank, in rank order; None: all
    served: Tensor | None
    send: list[int]  # of `requested`, owned by each rank
    receive: list[int]  # of `served`, requested by each rank
    sum_gradients: SumGradients | None = None  # of `served`, if prepared


def split_request(
    requested: Tensor, send: list[int], served: Tensor, receive: list[int], ranks: int
) -> list[RequestPart]:
    """Positions and counts, part after part and within each rank by rank (`divide_rows` gives
    both) -> the parts."""
    sends, receives = (
        [counts[at : at + ranks] for at in range(0, len(counts), ranks)]
        for counts in (send, receive)
    )
    cut = (
        torch.split(positions, [sum(part) for part in counts])
        for positions, counts in ((requested, sends), (served, receives))
    )
    return [RequestPart(*four) for four in zip(*cut, sends, receives, strict=True)]


@dataclass
class Request:
    """The rows of one group that a rank reads in a step. `Sharded.compare` sets the parts."""

    index: Index
    whole: RequestPart
    owned: Tensor  # [sum(receive)] local rows requested from this rank, in rank order
    pieces: int = 1  # into which bulk traffic is cut
    few: bool = False  # all its rows may wait for the update of the batch before
    counted: Tensor | None = None  # [sum(receive)] uint8: 0 for `owned` that are negatives there
    drawn: Tensor | None = None  # [sum(receive)] int64: what `owned` are worth as draws
    log_q: Tensor | None = None  # [u] float32, of the index's keys, if the table counts draws
    log_q_handle: Handle | None = None  # the same on its way
    slots: Tensor | None = None  # [sum(receive)] where `owned` are, once they are resident
    targets: Tensor | None = None  # [sum(receive)] where their gradients go
    rows: Tensor | None = None  # [u, width]: a leaf of autograd, unless there are `gradients`
    gradients: RowGradients | None = None  # of what reads the rows, if the kernels keep them
    # rows that the previous batch does not read: pulled while it computes
    early: list[RequestPart] = field(default_factory=list)
    late: RequestPart | None = None  # rows that it reads: they collide, and wait for its update
    collisions: int = 0  # `late` rows that are requested from this rank
    # rows that the following batch reads too: their gradients go first
    urgent: RequestPart | None = None
    # rows that it does not read: their gradients are deferred; None before that is known
    deferred: list[RequestPart] | None = None

    def open(self, rows: Tensor, train: bool) -> None:
        """The rows [u, width] are here: the model can read them; with `train`, their gradient is
        wanted."""
        self.rows = rows.detach().requires_grad_(train)
        if train and keeps_gradients(rows):
            self.gradients = RowGradients(self.index.parts, self.rows.detach())

    def await_log_q(self) -> None:
        """Where the table counts draws: it is here on return."""
        if self.log_q_handle is not None:
            self.log_q, self.log_q_handle = self.log_q_handle.wait(), None

    @property
    def bytes_of_rows(self) -> int:
        """Of the rows that this rank reads."""
        return self.rows.numel() * self.rows.element_size() if self.rows is not None else 0

    def list_tensors(self) -> list[Tensor]:
        """The tensors of a request, for streams other than the one that made it."""
        more = (self.slots, self.targets, self.log_q, self.counted, self.drawn)
        found = [self.owned, self.index.keys, *self.index.parts]
        return found + [each for each in more if each is not None]

    def drop_pulled(self) -> None:
        """All rows are here: forgets how they travelled."""
        self.early, self.late = [], None

    def read(self, part: int | None, index: Tensor) -> Tensor:
        """The rows [..., width] at index [...]; `part` of the ids that were given, or others."""
        assert self.rows is not None
        rows = self.rows if self.gradients is None else self.rows.detach()
        return read_rows(rows, index, self.gradients, part)

    def offer(self, part: int | None, index: Tensor) -> tuple[Tensor, Tensor]:
        """All rows [u, width], and the index [...] of some: for readers without `read`."""
        assert self.rows is not None
        return self.rows, index

    def take_gradient(self) -> Tensor:
        """The gradient of the rows [u, width]. Drops the rows: their memory is the caller's."""
        assert self.rows is not None
        rows, self.rows = self.rows, None
        gradients, self.gradients = self.gradients, None
        if gradients is not None:
            return sum_readings(gradients, rows.grad, rows.shape[0])
        return rows.grad if rows.grad is not None else torch.zeros_like(rows)


def sum_readings(gradients: RowGradients, others: Tensor | None, count: int) -> Tensor:
    """[count, width]: the gradients of what has read rows, summed by row; and of what has read them
    by itself, which made `others` [count, width]: the sums are added there."""
    rows, values = gradients.take(only_read=others is not None)
    if others is not None and not rows.numel():
        return others
    return sum_by_row(values, rows, count, others)


def require(part: RequestPart | None) -> RequestPart:
    """A part that `Sharded.compare` has set."""
    assert part is not None, "the requests were not compared"
    return part
