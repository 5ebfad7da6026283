"""Rows whose home is host memory or a file, and a cache of them on the device that computes.

    resolve         plan (host_tables/plan.py), write back what makes room, bring what is missing
    gather, update  by slots of the cache, as if it were the table
    get_tensors     write back all that changed; then the home is the table

The home is working memory: some of its rows are older than those in the cache, and a run that ends
leaves nothing of it. What is resident depends on the batches alone, whatever the schedule.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.embedding.host_tables.copies import (
    Copies,
    DirectCopies,
    HostCopies,
    Moved,
    PinnedCopies,
    move_nothing,
)
from freescale.embedding.host_tables.homes import open_home
from freescale.embedding.host_tables.plan import (
    PINNED,
    CacheContents,
    CachePlan,
    CacheTooSmall,
    UsedRows,
    plan_cache,
)
from freescale.embedding.host_tables.tiers import Host, Tier, format_bytes
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.storage.api import Counted, Recorder, Resolved, Storage, TableRange
from freescale.kernels.dispatch.versions import has_triton
from freescale.streams import InTurn

_CHUNK_BYTES = 64 << 20  # of rows that are made together


@dataclass(frozen=True)
class CacheTraffic:
    """What a batch requested of its owner, and what moved for it."""

    wanted: int  # different rows
    missed: int  # rows that were not in the cache
    bytes_up: int  # from the home into the cache
    bytes_down: int  # from the cache to the home


class CachedStorage(Storage):
    """A home for all rows, a cache for those that are used."""

    slots_are_rows = False
    may_fail = True  # the cache may be too small

    def __init__(
        self,
        ranges: list[TableRange],
        size: int,
        optimizer: RowOptimizer,
        device: torch.device,
        tier: Tier,
    ) -> None:
        """As `Storage`, with a cache of the tier's size a table. ValueError for want of room."""
        super().__init__(ranges, size, optimizer, device)
        spec = ranges[0].spec
        shapes = {"rows": (size, spec.width)} | {
            name: (size, *shape) for name, shape in optimizer.state_shapes(spec.width).items()
        }
        self._about = "table " + ", ".join(repr(name) for name in self._ranges)
        self._bytes_per_row = spec.dtype.itemsize * sum(
            torch.Size(shape[1:]).numel() for shape in shapes.values()
        )
        slots = min(size, max(1, len(ranges) * tier.cache_bytes // self._bytes_per_row))
        self._home = open_home(tier, shapes, spec.dtype, self._about)
        self._copies: Copies = HostCopies()
        if device.type == "cuda":
            self._copies = self._open_copies(tier, spec.bytes_per_row, device)
            self.chunk_rows = max(self.chunk_rows, _CHUNK_BYTES // spec.bytes_per_row)
        self.weight, self.state = self._allocate(slots, device)
        # Rows in the slots, for the marks of changed rows; the last one is that of slot -1.
        self._rows = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        self.contents = CacheContents.make(size, slots, device)
        self._batches = 0  # that were made resident
        # slots that may be newer than the home
        self._newer = torch.zeros(slots, dtype=torch.bool, device=device)
        self._in_turn = InTurn(device)
        # What the last plan read: a device may still be at it, in the order of another stream than
        # the one whose memory it is.
        self._read: list[UsedRows] = []
        self._updated = False  # since all of them were written back
        self.traffic = CacheTraffic(0, 0, 0, 0)  # of the last batch

    def _open_copies(self, tier: Tier, widest_row: int, device: torch.device) -> Copies:
        """Between a GPU and its host."""
        if isinstance(tier, Host) and tier.direct:
            reason = self._home.pin() if has_triton() else "there is no Triton"
            if not reason:
                return DirectCopies(widest_row, device)
            warnings.warn(
                f"{self._about}: the GPU cannot reach its rows in host memory ({reason}): the "
                "host's cores copy them, through buffers",
                stacklevel=2,
            )
        return PinnedCopies(widest_row)

    # ---- every step

    def resolve(self, rows: Tensor, ledger: Recorder, counted: Counted | None = None) -> Resolved:
        """Waits for the device, which plans: the host has to know which rows it copies."""
        with ledger.span("make resident"), self._in_turn():
            slots = self._make_resident(rows)
        for name, value in vars(self.traffic).items():
            ledger.count(f"cache_{name}", value)
        return Resolved(slots)

    def _make_resident(self, rows: Tensor) -> Tensor:
        unique, inverse = torch.unique(rows, return_inverse=True)
        self._read.clear()
        try:
            plan = plan_cache(self.contents, unique.long(), self._batches)
        except CacheTooSmall as error:
            raise self._explain(error) from None
        out_of = plan.into[: plan.leave.numel()]
        newer = self._newer.index_select(0, out_of).nonzero().view(-1)
        leave = plan.leave.index_select(0, newer)
        self._home.expect(leave, plan.bring)
        self._move(Moved(leave, out_of.index_select(0, newer)), Moved(plan.bring, plan.into))
        self._adopt(plan)
        self.traffic = CacheTraffic(
            plan.wanted.numel(),
            plan.bring.numel(),
            plan.bring.numel() * self._bytes_per_row,
            leave.numel() * self._bytes_per_row,
        )
        return plan.slots.to(rows.dtype).index_select(0, inverse)

    def _adopt(self, plan: CachePlan) -> None:
        self._rows.index_copy_(0, plan.into, plan.bring)
        self._read.extend(self.contents.queue)
        self.contents.apply(plan)
        self._newer.index_fill_(0, plan.slots, True)  # they are trained
        self._batches += 1

    def _explain(self, error: CacheTooSmall) -> CacheTooSmall:
        slots, row = self.contents.slots, self._bytes_per_row
        need = format_bytes(-(-error.need * row // len(self._ranges)))
        each = " for each of them" if len(self._ranges) > 1 else ""
        return CacheTooSmall(
            error.need,
            f"{self._about}: the cache holds {slots:,} rows of this rank "
            f"({format_bytes(slots * row)}), {error}: give it at least {need}{each}, or use "
            "smaller batches or more ranks",
        )

    def _move(self, down: Moved, up: Moved) -> None:
        caches = {"rows": self.weight, **self.state}
        pairs = [(self._home.tensors[name], cache) for name, cache in caches.items()]
        self._copies.move(pairs, down, up)

    def _mark(self, slots: Tensor) -> None:
        self._updated = True
        if self.changed.consumers:
            self.changed.mark(self._rows[slots.long()])

    def read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        self._write_back()
        found = self._home.tensors["rows"].index_select(0, rows.cpu().long())
        return found.to(self.weight.device).to(dtype)

    # ---- all rows of this rank

    def get_tensors(self, name: str) -> dict[str, Tensor]:
        self._write_back()
        part = self._ranges[name].slice
        return {key: value[part] for key, value in self._home.tensors.items()}

    def _write_back(self) -> None:
        """Afterwards the home has every update made so far, and the host may use it."""
        if self._updated:
            self._updated = False
            with self._in_turn():
                slots = self._newer.nonzero().view(-1)
                rows = self.contents.row_of.index_select(0, slots)
                self._move(Moved(rows, slots), move_nothing(rows.device))
                # Those of the last batches are on their way through steps, and change again.
                self._newer &= self.contents.last_use >= self._batches - PINNED
        self._copies.wait()

    def reload(self) -> None:
        """The home was written to: the cache takes its rows."""
        self._updated = False
        filled = self.contents.filled
        with self._in_turn():
            slots = torch.arange(filled, device=self._rows.device)
            self._move(move_nothing(slots.device), Moved(self.contents.row_of[:filled], slots))
        self._copies.wait()
