"""What one rank reads of a group of tables in one step, in its phases. Each phase is a type:

    RequestedIds    the ids of its (micro-)batches, and what the owners have to know about them
    Requested       the ids are deduplicated, and each owner has those of its rows
    Resident        the owners can gather and update these rows
    RowParts, GradientParts
                    rows and gradients are divided by what the batches before and after read

The rows themselves are in rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.dynamic.draws import SAMPLE
from freescale.embedding.dynamic_rules import DEFAULT_ID, LEARNED
from freescale.embedding.layout import TableSpec, find_feature_ids
from freescale.transport.api import Handle

# A batch's ids of one group: (table index within the group, the batch's own tensor of ids).
GroupIds = Sequence[tuple[int, Tensor]]
# gradients [n, width] of served rows -> (unique local rows [u], their summed gradients [u, width])
SumGradients = Callable[[Tensor], tuple[Tensor, Tensor]]

_AT_ONCE = 2  # mark of an id that needs no admission


class RequestedIds(NamedTuple):
    """The ids that some (micro-)batches hold for the tables of a group."""

    ids: GroupIds
    # [n] uint8: 0 for negatives, which do not count, 1 for other ids, 2 for that of a learned
    # default row; None: the table has neither negatives nor such a row
    marks: Tensor | None
    # [n] int64: what each reading is worth as a draw from its sample (dynamic/draws.py); None: the
    # table does not count draws
    draws: Tensor | None


def list_ids(batches: Sequence[SequenceBatch], specs: Sequence[TableSpec]) -> RequestedIds:
    """Lists the ids of some (micro-)batches."""
    rules, learned = specs[0].dynamic, has_default_row(specs[0])
    negatives = set(rules.negatives if rules is not None else ()) & set(specs[0].features)
    drawn = rules.draws if rules is not None else None
    ids: list[tuple[int, Tensor]] = []
    marks: list[Tensor] = []
    draws: list[Tensor] = []
    for table, spec in enumerate(specs):
        for batch in batches:
            for feature, values in find_feature_ids(batch, spec):
                ids.append((table, values))
                size, device = values.numel(), values.device
                if negatives or learned:
                    counts = feature not in negatives
                    marks.append(torch.full((size,), counts, dtype=torch.uint8, device=device))
                if drawn is not None:
                    draws.append(_measure_draws(batch, feature, values, drawn))
    if ids and learned:
        # Whatever ids have no row, the one that they read travels like any other.
        device = ids[0][1].device
        ids.append((0, torch.full((1,), DEFAULT_ID, device=device)))
        marks.append(torch.full((1,), _AT_ONCE, dtype=torch.uint8, device=device))
        if drawn is not None:
            draws.append(torch.zeros(1, dtype=torch.int64, device=device))
    return RequestedIds(
        ids, torch.cat(marks) if marks else None, torch.cat(draws) if draws else None
    )


def _measure_draws(batch: SequenceBatch, feature: str, ids: Tensor, drawn: str) -> Tensor:
    """[n] int64 for ids [...] of a feature; those of the feature `drawn` are draws."""
    if feature == drawn and feature in batch.sequences:
        lengths = wholes = batch.sequences[feature].lengths
        if batch.divided is not None:  # a part draws as much as its share of the history
            own = lengths.new_tensor(batch.divided.wholes)
            wholes = torch.cat([own, lengths[len(own) :]])
        each = SAMPLE // wholes.clamp(min=1)
        return torch.repeat_interleave(each, lengths, output_size=ids.numel())
    worth = SAMPLE if feature == drawn else 0
    return torch.full((ids.numel(),), worth, dtype=torch.int64, device=ids.device)


def has_default_row(spec: TableSpec) -> bool:
    """Whether ids without a row read one that is learned. Such a table is alone in its group."""
    return spec.dynamic is not None and spec.dynamic.default == LEARNED


class Index:
    """Finds the fetched row of an id: by identity of the given tensors, else by search."""

    def __init__(self, keys: Tensor, given: GroupIds, inverse: Tensor) -> None:
        """keys [u] sorted; the given tensors of ids, and inverse [n], the key of each id."""
        self.keys = keys
        self._read: Tensor | None = None  # [u] which fetched row is read for each; None: its own
        self._own = torch.split(inverse, [ids.numel() for _, ids in given])
        self._known = [
            (table, ids, ids._version, part)
            for (table, ids), part in zip(given, self._own, strict=True)
        ]

    def replace_parts(self, keys: Tensor, inverse: Tensor) -> Index:
        """For the same ids, with other keys."""
        return Index(keys, [(table, ids) for table, ids, *_ in self._known], inverse)

    def redirect(self, missing: Tensor) -> Index:
        """An index that reads the last given id's row for missing [u] bool keys."""
        if not missing.numel():
            return self
        found = copy(self)
        own = torch.arange(len(missing), device=missing.device)
        read = found._read = torch.where(missing, self._own[-1], own)
        found._known = [
            (table, ids, version, read.index_select(0, part))
            for (table, ids, version, _), part in zip(self._known, self._own, strict=True)
        ]
        return found

    def find_own(self, table: int, ids: Tensor, keys: Tensor) -> Tensor:
        """Where keys [...] of ids [...] are among those fetched, whatever row is read for them."""
        known = self.find_known(table, ids)
        if known is not None:
            return self._own[known[0]].view(ids.shape)
        return torch.searchsorted(self.keys, keys).clamp_(max=self.keys.numel() - 1)

    @property
    def parts(self) -> list[Tensor]:
        """Indices of the fetched rows of each tensor of ids that was given."""
        return [part for *_, part in self._known]

    def find_known(self, table: int, ids: Tensor) -> tuple[int, Tensor] | None:
        """(number of the part, indices [...] of fetched rows) of given ids [...], else None."""
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
class Relay:
    """How the rows of a part travel within a machine (two_level.py): requests of its ranks to the
    leaders."""

    requested: Tensor  # [sum(send)] positions among the rows that this rank reads, by leader
    # [sum(receive)] places in the part's `requested` of the rows that this machine's ranks request
    # from this leader, in rank order
    members: Tensor
    send: list[int]  # sizes of `requested`, to each leader
    receive: list[int]  # sizes of `members`, from each rank
    sum_gradients: SumGradients | None = None  # for `members`, if prepared


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
    relay: Relay | None = None  # None: the rows that this rank requests are those that it reads

    @property
    def places(self) -> Tensor | None:
        """[n] positions among the rows that this rank reads; None: all, in their order."""
        if self.relay is None or self.requested is None:
            return self.requested
        return self.relay.requested


def split_request(
    requested: Tensor, send: list[int], served: Tensor, receive: list[int], ranks: int
) -> list[RequestPart]:
    """Positions and counts, part after part, by rank, as of `divide_rows` -> the parts."""
    sends, receives = (
        [counts[at : at + ranks] for at in range(0, len(counts), ranks)]
        for counts in (send, receive)
    )
    cut = (
        torch.split(positions, [sum(part) for part in counts])
        for positions, counts in ((requested, sends), (served, receives))
    )
    return [RequestPart(*four) for four in zip(*cut, sends, receives, strict=True)]


@dataclass(frozen=True)
class Requested:
    """The rows of one group that a rank reads in a step, as their owners know them."""

    index: Index
    keys: Tensor  # [sum(send)] sorted: what this rank requests, for its machine if it leads
    whole: RequestPart  # all rows
    owned: Tensor  # [sum(receive)] local rows requested from this rank, in rank order
    bytes: int  # of the rows that a rank reads, mean over the ranks
    pieces: int  # into which bulk traffic is cut
    marks: Tensor | None  # [sum(receive)] as of `RequestedIds`: the largest of each row
    draws: Tensor | None  # [sum(receive)] as of `RequestedIds`: the sum of each row

    def list_tensors(self) -> list[Tensor]:
        """All tensors, for streams other than the one that made them."""
        found = [self.owned, self.keys, self.index.keys, *self.index.parts]
        if (relay := self.whole.relay) is not None:
            found += [relay.requested, relay.members]
        return found + [each for each in (self.marks, self.draws) if each is not None]


class LogQ:
    """The log-q [u] of a request's keys, on its way from their owners."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._arrived: list[Tensor] = []

    def wait(self) -> Tensor:
        """The first call waits for it, on the thread and stream of the caller."""
        if not self._arrived:
            self._arrived.append(self._handle.wait())
        return self._arrived[0]


@dataclass(frozen=True)
class Resident:
    """A request whose rows their owners can gather and update."""

    index: Index  # of the request; ids that have no row are redirected to the default row
    slots: Tensor  # [sum(receive)] where `owned` are
    targets: Tensor  # [sum(receive)] where their gradients go
    log_q: LogQ | None  # None: the table does not count draws


@dataclass(frozen=True)
class GradientParts:
    """The gradients of a batch, divided by the rows that the following batch reads too."""

    urgent: RequestPart  # of these rows: they go first
    deferred: list[RequestPart]  # of the others


@dataclass(frozen=True)
class RowParts:
    """The rows of a batch, divided by those that the batch before it reads too."""

    late: RequestPart  # these rows: they collide, and wait for its update
    early: list[RequestPart]  # the others: pulled while it computes
    collisions: int  # `late` rows that are requested from this rank
