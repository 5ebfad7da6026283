"""The plan of the reference attention: from a batch's lengths to padded groups and their tiles.

Made once per batch, for all layers of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.batch import HostSizes
from freescale.kernels.attention.checks import check_same_device, read_sizes
from freescale.kernels.attention.pairs import Pairs, count_pairs, list_pairs
from freescale.kernels.groups import Group, Groups

TILE_BUDGET = 1 << 20  # scores (samples * heads * queries * keys) at a time
TILE_ROWS = 128  # queries at a time: fewer skip more of the upper triangle, in more operations
# pairs of tokens whose time buckets and masks are kept for all layers of a step
RELATION_BUDGET = 1 << 24
BUCKET_WIDTH = 0.301
# Scores (heads * pairs of tokens) up to which a CPU lists the pairs: of histories of a few events
# there are few, and moving them into groups takes longer than what is computed.
LISTED_SCORES = 1 << 13


@dataclass(frozen=True)
class Relation:
    """How the queries [start, stop) of a group stand to its keys [0, stop). Axis n is 1 where
    samples do not differ."""

    start: int
    stop: int
    distance: Tensor | None  # [n, queries, keys] int32: difference of positions
    bucket: Tensor | None  # [n, queries, keys] int32: of the difference in time
    blocked: Tensor | None  # [n, 1, queries, keys] bool; None: blocked above the diagonal only


@dataclass(frozen=True)
class AttentionPlan:
    """What the layers of one step share. Made once from a batch's lengths: the only place that
    reads the device."""

    groups: Groups
    heads: int
    rows: int
    budget: int
    candidate_counts: Tensor | None
    timestamps: Tensor | None
    buckets: int
    distances: bool
    longest_history: int
    longest_distance: int  # between two positions
    kept: dict[int, list[Relation]]  # by group; empty where it would take too much memory
    pairs: Pairs | None  # of all tokens, where they are few; there are no groups then
    bucket: Tensor | None  # [pairs] int32: of their difference in time

    @property
    def tokens(self) -> int:
        return self.groups.tokens

    @property
    def lengths(self) -> Tensor:  # [samples] int64
        return self.groups.lengths

    @property
    def timed(self) -> bool:
        return self.timestamps is not None

    def tiles(self, number: int) -> Iterator[Relation]:
        """The tiles of a group, from the bottom up: the first has all keys."""
        if number in self.kept:
            yield from self.kept[number]
            return
        group = self.groups.groups[number]
        positions, times = self._find_coordinates(group)
        per_row = len(group) * self.heads * group.length
        rows = max(1, min(self.rows, self.budget // per_row))
        for stop in range(group.length, 0, -rows):
            yield self._relate(group, max(0, stop - rows), stop, positions, times)

    def _find_coordinates(self, group: Group) -> tuple[Tensor, Tensor | None]:
        """Positions [n or 1, length] and times [n, length] of a group's slots."""
        positions = torch.arange(group.length, device=group.slots.device)[None]
        if self.candidate_counts is not None:  # every candidate stands right after the history
            history = self.groups.lengths[group.samples] - self.candidate_counts[group.samples]
            positions = torch.minimum(positions, history[:, None])
        return positions, None if self.timestamps is None else group.pad(self.timestamps)

    def _relate(
        self, group: Group, start: int, stop: int, positions: Tensor, times: Tensor | None
    ) -> Relation:
        distance = _find_distances(positions, start, stop) if self.distances else None
        bucket = None
        if times is not None:
            bucket = _find_buckets(times[:, start:stop, None] - times[:, None, :stop], self.buckets)
        blocked = None
        if self.candidate_counts is not None:
            slots = torch.arange(stop, device=positions.device)
            history = self.groups.lengths[group.samples] - self.candidate_counts[group.samples]
            after = slots[None, :] > slots[start:stop, None]  # [queries, keys]
            other = slots[None, :] != slots[start:stop, None]
            candidate = slots[None, :] >= history[:, None]  # [n, keys]
            blocked = (after | (other & candidate[:, None]))[:, None]
        return Relation(start, stop, distance, bucket, blocked)


def _find_distances(positions: Tensor, start: int, stop: int) -> Tensor:
    """positions [n, length] -> [n, queries, keys] int32."""
    apart = positions[:, start:stop, None] - positions[:, None, :stop]
    return apart.clamp_(min=0).to(torch.int32)


def _find_buckets(elapsed: Tensor, buckets: int) -> Tensor:
    """Differences in time, overwritten -> buckets, int32, of the same shape."""
    # float64: integers next to a bucket's edge fall on the same side wherever they are computed
    logarithm = elapsed.clamp_(min=1).to(torch.float64).log_()
    return logarithm.div_(BUCKET_WIDTH).clamp_(max=buckets).to(torch.int32)


def plan_attention(
    lengths: Tensor,
    heads: int,
    *,
    candidate_counts: Tensor | None = None,
    timestamps: Tensor | None = None,
    buckets: int = 0,
    distances: bool = False,
    budget: int = TILE_BUDGET,
    rows: int = TILE_ROWS,
    host: HostSizes | None = None,
    list_few: bool = True,
    listed_scores: int | None = None,
) -> AttentionPlan:
    """Groups and tiles for these lengths. A time bias needs `timestamps` and `buckets`, a position
    bias `distances`. Reads from the device what `host` does not know. `list_few`: where a CPU has
    few pairs of tokens, at most `listed_scores`, the plan is a list of them."""
    if heads < 1 or rows < 1:
        raise ValueError(f"heads and rows must be at least 1, not {heads} and {rows}")
    check_same_device(lengths=lengths, candidate_counts=candidate_counts, timestamps=timestamps)
    sizes = read_sizes(lengths, candidate_counts, host)
    few = min(LISTED_SCORES if listed_scores is None else listed_scores, budget)
    listed = list_few and lengths.device.type == "cpu" and heads * count_pairs(sizes) <= few
    groups = (
        Groups((), lengths, sizes.lengths, int(sizes.lengths.sum()))
        if listed
        else Groups.of(lengths, lambda length: heads * length * length, budget, sizes.lengths)
    )
    if timestamps is not None and (
        timestamps.dtype != torch.int64 or timestamps.shape != (groups.tokens,)
    ):
        raise ValueError(
            f"timestamps must be int64 [{groups.tokens}], one per token, not {timestamps.dtype} "
            f"{list(timestamps.shape)}"
        )
    pairs = list_pairs(sizes) if listed else None
    bucket = None
    if pairs is not None and timestamps is not None:
        elapsed = timestamps.index_select(0, pairs.query) - timestamps.index_select(0, pairs.key)
        bucket = _find_buckets(elapsed, buckets)
    kept: dict[int, list[Relation]] = {}
    plan = AttentionPlan(
        groups, heads, rows, budget, candidate_counts, timestamps, buckets, distances,
        sizes.longest_history, sizes.longest_distance, kept, pairs, bucket,
    )  # fmt: skip
    if sum(len(group) * group.length**2 for group in groups.groups) <= RELATION_BUDGET:
        kept |= {number: list(plan.tiles(number)) for number in range(len(groups.groups))}
    return plan
