"""The plan of the Triton attention: from a batch's lengths to the tables of tiles that its kernels
read, longest first. Made on the host; launches no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.batch import HostSizes, compute_offsets
from freescale.kernels.attention.checks import Plan, read_batch
from freescale.kernels.attention.plan import BUCKET_WIDTH
from freescale.kernels.attention.plan_columns import PAIR_QUERIES, TileColumn
from freescale.kernels.upload import upload
from freescale.visible import Visible

MAX_BUCKETS = 4095
BAND = 4096  # keys; see TilePlan.query_tiles


@dataclass(frozen=True)
class TilePlan(Plan):
    """The plan of the Triton kernels. Its `times` count from the sample's first token: int32 if
    they fit, else int64."""

    host: np.ndarray  # [samples] lengths
    history: np.ndarray  # [samples] tokens before the candidates
    kept: dict[Any, Any] = field(default_factory=dict)
    first: np.ndarray | None = None  # [samples] as `TileColumn.FIRST`; None: 0

    def samples(self) -> Tensor:
        """[samples, SampleColumn] int32."""
        return self._keep(("samples", 0))[0]

    def _keep(self, key: tuple[str, int]) -> tuple[Tensor, ...]:
        """The tables of a (kind, tile size) on the device. The first call makes them."""
        tables: tuple[Tensor, ...] | None = self.kept.get(key)
        if tables is None:
            tables = self.kept[key] = tuple(map(self._upload, self.compute_tables(key)))
        return tables

    def compute_tables(self, key: tuple[str, int]) -> tuple[np.ndarray, ...]:
        """The tables of a (kind, tile size) on the host."""
        of, size = key
        if of == "samples":
            starts = np.cumsum(self.host) - self.host
            return (np.column_stack([starts, self.host, self.history]),)
        return (self._compute_tiles(size, of),)

    def query_tiles(self, size: int) -> Tensor:
        """[tiles, TileColumn] int32: tiles of `size` queries, those with most keys first."""
        return self._keep(("queries", size))[0]

    def key_tiles(self, size: int) -> Tensor:
        """[tiles, TileColumn] int32: tiles of `size` keys, those with most queries first."""
        return self._keep(("keys", size))[0]

    def _compute_tiles(self, size: int, of: str) -> np.ndarray:
        table = self._build_rows(size)
        if of == "queries" and self.first is not None:
            table = table[table[:, TileColumn.ROW] >= table[:, TileColumn.FIRST]]
        start, length, history, row, _, least, _ = table.T
        cost = (
            np.minimum(row, history) + size
            if of == "queries"
            else np.where(row < history, length - np.maximum(row, least), size)
        )
        if self.visible is not None:
            first, last = self.visible.first, self.visible.last
            most = np.where((of == "keys") & (row < first), cost, last + size)
            cost = np.minimum(cost, most + (first if of == "queries" else 0))
        # Longest first: the last programs to start are the shortest, and no SM is left running
        # alone at the end. Within a band of costs, tiles of the same sample run together and share
        # their keys in the cache.
        within = (start << 32) - cost  # order in a band: by sample, longest first
        if int(cost.max(initial=0)) < BAND:
            order = np.argsort(within, kind="stable")  # nearly sorted: much faster than lexsort
        else:
            order = np.lexsort((within, -(cost // BAND)))
        ordered: np.ndarray = table[order]
        return ordered

    def count_sums(self, size: int) -> int:
        """Numbers of a part of the sums by distance, over all tiles of `size` queries."""
        tiles, before = -(-self.host // size), -(-self._list_first() // size)
        return int(((tiles * (tiles + 1) - before * (before + 1)) // 2 * size).sum())

    def edges(self) -> Tensor:
        """[buckets + 1]: the shortest time of each bucket, in the dtype of the times."""
        edges: Tensor | None = self.kept.get("edges")
        if edges is None:
            assert self.times is not None
            dtype = self.times.dtype
            host = find_bucket_edges(self.buckets).clamp(max=torch.iinfo(dtype).max).to(dtype)
            edges = self.kept["edges"] = upload(host.numpy(), self.lengths.device)
        return edges

    def _build_rows(self, size: int) -> np.ndarray:
        per_sample = -(-self.host // size)
        sample = np.repeat(np.arange(len(self.host)), per_sample)
        first = np.cumsum(per_sample) - per_sample
        row = (np.arange(len(sample)) - first[sample]) * size
        start = np.cumsum(self.host) - self.host
        pairs = self._find_first_blocks()
        columns = [start, self.host, self.history, pairs, self._list_first()]
        start, length, history, pairs, before = (column[sample] for column in columns)
        room = np.where(row >= before, row + size, 0)  # no tiles of queries before the first
        sums = np.minimum(np.cumsum(room) - room, 2**31 - 1)
        return np.column_stack([start, length, history, row, pairs, before, sums])

    def _list_first(self) -> np.ndarray:
        return np.zeros_like(self.host) if self.first is None else self.first

    @property
    def pair_blocks(self) -> int:
        """Number of blocks in the table of pair biases. A block has PAIR_QUERIES x PAIR_KEYS pairs.
        Blocks are ordered by sample, query and key; queries have no blocks of later keys, and those
        before `first` none at all."""
        return int(self._count_blocks().sum())

    def _count_blocks(self) -> np.ndarray:
        of_queries = -(-self.host // PAIR_QUERIES)
        return np.asarray(of_queries * (of_queries + 1) - self._count_lacking())

    def _count_lacking(self) -> np.ndarray:
        """[samples] blocks of the queries before `first`."""
        of_queries = self._list_first() // PAIR_QUERIES
        return np.asarray(of_queries * (of_queries + 1))

    def _find_first_blocks(self) -> np.ndarray:
        """[samples]: each sample's first block, or where it would be. Only tables within reach of
        32 bits are made."""
        blocks = self._count_blocks()
        there = np.minimum(np.cumsum(blocks) - blocks, 2**31 - 1)
        return np.asarray(there - self._count_lacking())

    def _upload(self, table: np.ndarray) -> Tensor:
        return upload(table.astype(np.int32), self.lengths.device)


@cache
def find_bucket_edges(buckets: int) -> Tensor:
    """[buckets + 1] int64: the shortest time in each bucket, by the reference's arithmetic."""
    number = torch.arange(buckets + 1)
    low, high = torch.zeros_like(number), torch.full_like(number, torch.iinfo(torch.int64).max)
    while (high - low > 1).any():  # low: below the bucket; high: in it, or the largest integer
        middle = low + (high - low) // 2
        bucket = middle.clamp(min=1).to(torch.float64).log().div(BUCKET_WIDTH).to(torch.int64)
        inside = bucket >= number
        low, high = torch.where(inside, low, middle), torch.where(inside, middle, high)
    return high


def plan_attention(
    lengths: Tensor, heads: int, *, candidate_counts: Tensor | None = None,
    timestamps: Tensor | None = None, buckets: int = 0, distances: bool = False,
    host: HostSizes | None = None, visible: Visible | None = None,
    first: Sequence[int] | None = None,
) -> TilePlan:  # fmt: skip
    """As the reference, for the kernels."""
    if not 0 <= buckets <= MAX_BUCKETS:
        raise ValueError(f"there may be 0 to {MAX_BUCKETS} time buckets, not {buckets}")
    sizes = read_batch(lengths, heads, candidate_counts, timestamps, host)
    tokens = int(sizes.lengths.sum())
    if tokens >= 2**31:
        raise ValueError(f"a batch may have fewer than 2^31 tokens, not {tokens}")
    times = None
    if timestamps is not None:
        times = subtract_first(timestamps, lengths, None if host is None else host.time_span)
    return TilePlan(
        lengths, heads, tokens, candidate_counts, times, buckets, distances,
        sizes.longest_history, sizes.longest_distance, visible, sizes.lengths, sizes.history,
        first=None if first is None else np.array(first) // PAIR_QUERIES * PAIR_QUERIES,
    )  # fmt: skip


def subtract_first(timestamps: Tensor, lengths: Tensor, span: int | None) -> Tensor:
    """[tokens] times since the sample's first token; in 32 bits, which is faster, if their
    differences fit."""
    tokens = timestamps.numel()
    if not tokens:
        return timestamps.to(torch.int32)
    first = timestamps[compute_offsets(lengths)[:-1].clamp(max=tokens - 1)]
    relative = timestamps - torch.repeat_interleave(first, lengths, output_size=tokens)
    if span is None:
        fits = bool(torch.logical_and(relative.min() > -(2**30), relative.max() < 2**30))
    else:
        fits = span < 2**30
    return relative.to(torch.int32) if fits else relative
