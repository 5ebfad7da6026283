"""The plan of the Triton attention: from a batch's lengths to tables of tiles, longest first, that
its kernels read.

Made on the host, once per batch, for all layers of a step. Pure: no kernel is launched here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.batch import HostSizes, compute_offsets
from freescale.kernels.attention.checks import check_same_device, read_sizes
from freescale.kernels.attention.plan import BUCKET_WIDTH
from freescale.kernels.attention.plan_columns import (
    PAIR_QUERIES,
    WalkColumn,
)
from freescale.kernels.upload import upload

MAX_BUCKETS = 4095
BAND = 4096  # keys; see TilePlan.query_tiles
MIN_WALK, MAX_PIECES = 32, 8  # see TilePlan.walks


@dataclass(frozen=True)
class TilePlan:
    """What the layers of one step share. Made once from a batch's lengths: the only place that
    reads the device."""

    lengths: Tensor  # [samples] int64
    heads: int
    tokens: int
    host: np.ndarray  # [samples] lengths
    history: np.ndarray  # [samples] tokens before the candidates
    candidate_counts: Tensor | None
    times: Tensor | None  # [tokens] since the sample's first token: int32 if they fit, else int64
    buckets: int
    distances: bool
    longest_history: int
    longest_distance: int
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        return self.times is not None

    def samples(self) -> Tensor:
        """[samples, SampleColumn] int32."""
        return self._keep(("samples", 0))[0]

    def _keep(self, key: tuple[str, int]) -> tuple[Tensor, ...]:
        """The tables of a kind and size of tile, on the device; made when they are first needed."""
        tables: tuple[Tensor, ...] | None = self.kept.get(key)
        if tables is None:
            tables = self.kept[key] = tuple(map(self._upload, self.compute_tables(key)))
        return tables

    def compute_tables(self, key: tuple[str, int]) -> tuple[np.ndarray, ...]:
        """The tables of a kind and size of tile, on the host."""
        of, size = key
        if of == "samples":
            starts = np.cumsum(self.host) - self.host
            return (np.column_stack([starts, self.host, self.history]),)
        return self._compute_walks(size) if of == "walks" else (self._compute_tiles(size, of),)

    def query_tiles(self, size: int) -> Tensor:
        """[tiles, TileColumn] int32: tiles of `size` queries, those with most keys first."""
        return self._keep(("queries", size))[0]

    def key_tiles(self, size: int) -> Tensor:
        """[tiles, TileColumn] int32: tiles of `size` keys, those with most queries first."""
        return self._keep(("keys", size))[0]

    def _compute_tiles(self, size: int, of: str) -> np.ndarray:
        table, _ = self._build_rows(size)
        start, length, history, row, _ = table.T
        cost = (
            np.minimum(row, history) + size
            if of == "queries"
            else np.where(row < history, length - row, size)
        )
        # Longest first: the last programs to start are the shortest, so that no multiprocessor
        # works on alone. In bands: within one, tiles of the same sample run together and find
        # each other's keys in the cache.
        within = (start << 32) - cost  # of a band: by sample, its longest first
        if int(cost.max(initial=0)) < BAND:
            order = np.argsort(within, kind="stable")  # nearly in order: a fraction of a lexsort
        else:
            order = np.lexsort((within, -(cost // BAND)))
        ordered: np.ndarray = table[order]
        return ordered

    def walks(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tables by which the biases' gradients are summed.

        A walk along a whole diagonal would run long after all others: samples are cut into pieces
        by their keys, in a number that does not grow with the length.

        Returns:
            walks [programs, WalkColumn] int32, longest first; pieces [pieces, PieceColumn] int32,
            by falling number of tiles; counts [blocks] int32: how many pieces have more tiles than
            the block's number.
        """
        walks, pieces, counts = self._keep(("walks", size))
        return walks, pieces, counts

    def _compute_walks(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        table, tiles = self._build_rows(size)
        start = np.cumsum(self.host) - self.host
        span = np.maximum(MIN_WALK, -(-tiles // MAX_PIECES))  # tiles of keys in a piece
        per_sample = -(-tiles // span)
        sample = np.repeat(np.arange(len(tiles)), per_sample)
        piece = np.arange(len(sample)) - (np.cumsum(per_sample) - per_sample)[sample]
        left = tiles[sample] - piece * span[sample]  # diagonals that cross the piece
        slots = np.cumsum(left) - left
        owner = np.repeat(np.arange(len(sample)), left)  # of every walk, its piece
        slot = np.arange(len(owner))
        diagonal = (slot - slots[owner]) * size
        of, key = sample[owner], piece[owner] * span[sample[owner]] * size
        columns = [
            start[of],
            self.host[of],
            self.history[of],
            diagonal,
            slot,
            key,
            np.minimum(key + span[of] * size, self.host[of]),
            self._find_first_blocks()[of],
        ]
        walks = np.column_stack(columns)
        history = walks[:, WalkColumn.HISTORY]
        cost = np.maximum(np.minimum(walks[:, WalkColumn.STOP], history - diagonal) - key, 0)
        cost *= np.where(diagonal <= size, 4, 1)  # short times fall in many buckets
        if self.candidate_counts is not None:
            _, length, history, row, pairs = table.T
            column = np.column_stack(
                [table[:, :4], np.arange(len(table)), row, np.full(len(table), -1), pairs]
            )
            several = np.where(row < history, length - history, size) * (length > history)
            walks, cost = np.concatenate([walks, column]), np.concatenate([cost, several])
        order = np.argsort(-left, kind="stable")
        pieces = np.column_stack(
            [slots, left, start[sample], np.where(piece == 0, self.history[sample], 0)]
        )[order]
        counts = np.searchsorted(-left[order], -np.arange(left.max(initial=0)), side="left")
        walks = walks[np.argsort(-cost, kind="stable")]
        return walks, pieces, counts

    def edges(self) -> Tensor:
        """[buckets + 1]: the shortest time of each bucket, in the dtype of the times."""
        edges: Tensor | None = self.kept.get("edges")
        if edges is None:
            assert self.times is not None
            dtype = self.times.dtype
            host = _find_bucket_edges(self.buckets).clamp(max=torch.iinfo(dtype).max).to(dtype)
            edges = self.kept["edges"] = upload(host.numpy(), self.lengths.device)
        return edges

    def _build_rows(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        per_sample = -(-self.host // size)
        sample = np.repeat(np.arange(len(self.host)), per_sample)
        first = np.cumsum(per_sample) - per_sample
        row = (np.arange(len(sample)) - first[sample]) * size
        start = np.cumsum(self.host) - self.host
        pairs = self._find_first_blocks()
        columns = [start[sample], self.host[sample], self.history[sample], row, pairs[sample]]
        return np.column_stack(columns), per_sample

    @property
    def pair_blocks(self) -> int:
        """Blocks of the table of pair biases: PAIR_QUERIES x PAIR_KEYS pairs each, of a query and
        keys up to its block's last; by sample, query and key."""
        return int(self._count_blocks().sum())

    def _count_blocks(self) -> np.ndarray:
        of_queries = -(-self.host // PAIR_QUERIES)
        return np.asarray(of_queries * (of_queries + 1))

    def _find_first_blocks(self) -> np.ndarray:
        """[samples]: where each begins. Only tables within reach of 32 bits are ever made."""
        blocks = self._count_blocks()
        return np.asarray(np.minimum(np.cumsum(blocks) - blocks, 2**31 - 1))

    def _upload(self, table: np.ndarray) -> Tensor:
        return upload(table.astype(np.int32), self.lengths.device)


@cache
def _find_bucket_edges(buckets: int) -> Tensor:
    """[buckets + 1] int64: the smallest time between two tokens that falls in each bucket, by the
    reference's arithmetic."""
    number = torch.arange(buckets + 1)
    low, high = torch.zeros_like(number), torch.full_like(number, torch.iinfo(torch.int64).max)
    while (high - low > 1).any():  # low: below the bucket; high: in it or the largest there is
        middle = low + (high - low) // 2
        inside = (
            middle.clamp(min=1).to(torch.float64).log().div(BUCKET_WIDTH).to(torch.int64) >= number
        )
        low, high = torch.where(inside, low, middle), torch.where(inside, middle, high)
    return high


def plan_attention(
    lengths: Tensor,
    heads: int,
    *,
    candidate_counts: Tensor | None = None,
    timestamps: Tensor | None = None,
    buckets: int = 0,
    distances: bool = False,
    host: HostSizes | None = None,
) -> TilePlan:
    """Tiles for these lengths. A time bias needs `timestamps` and `buckets`, a position bias
    `distances`. Reads from the device what `host` does not know."""
    if heads < 1:
        raise ValueError(f"heads must be at least 1, not {heads}")
    check_same_device(lengths=lengths, candidate_counts=candidate_counts, timestamps=timestamps)
    if not 0 <= buckets <= MAX_BUCKETS:
        raise ValueError(f"there may be 0 to {MAX_BUCKETS} time buckets, not {buckets}")
    sizes = read_sizes(lengths, candidate_counts, host)
    tokens = int(sizes.lengths.sum())
    if tokens >= 2**31:
        raise ValueError(f"a batch may have fewer than 2^31 tokens, not {tokens}")
    if timestamps is not None and (
        timestamps.dtype != torch.int64 or timestamps.shape != (tokens,)
    ):
        raise ValueError(
            f"timestamps must be int64 [{tokens}], one per token, not "
            f"{timestamps.dtype} {list(timestamps.shape)}"
        )
    times = (
        None
        if timestamps is None
        else subtract_first(timestamps, lengths, None if host is None else host.time_span)
    )
    return TilePlan(
        lengths=lengths,
        heads=heads,
        tokens=tokens,
        host=sizes.lengths,
        history=sizes.history,
        candidate_counts=candidate_counts,
        times=times,
        buckets=buckets,
        distances=distances,
        longest_history=sizes.longest_history,
        longest_distance=sizes.longest_distance,
    )


def subtract_first(timestamps: Tensor, lengths: Tensor, span: int | None) -> Tensor:
    """[tokens] times since the sample's first token; in 32 bits, which the kernels are faster with,
    if differences fit."""
    tokens = timestamps.numel()
    if not tokens:
        return timestamps.to(torch.int32)
    first = timestamps[compute_offsets(lengths)[:-1].clamp(max=tokens - 1)]
    relative = timestamps - torch.repeat_interleave(first, lengths, output_size=tokens)
    fits = (
        bool(torch.logical_and(relative.min() > -(2**30), relative.max() < 2**30))
        if span is None
        else span < 2**30
    )
    return relative.to(torch.int32) if fits else relative
