"""The plan of the reference attention: from a batch's lengths to padded groups and their tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freescale.batch import HostSizes
from freescale.kernels.attention.checks import Plan, read_batch
from freescale.kernels.attention.pairs import Pairs, count_pairs, list_pairs
from freescale.kernels.groups import Group, Groups
from freescale.visible import Visible

TILE_BUDGET = 1 << 20  # scores (samples * heads * queries * keys) at a time
TILE_ROWS = 128  # queries at a time: fewer skip more of the upper triangle, in more operations
# most pairs of tokens whose time buckets and masks are kept for all layers of a step
RELATION_BUDGET = 1 << 24
BUCKET_WIDTH = 0.301
# Scores (heads * pairs of tokens) up to which a CPU lists the pairs. Histories of a few events have
# few pairs, and moving their tokens into groups takes longer than the computation.
LISTED_SCORES = 1 << 13


@dataclass(frozen=True)
class Relation:
    """Distances, times and masks between the queries [start, stop) of a group and its keys
    [0, stop). Axis n is 1 if all samples are alike."""

    start: int
    stop: int
    distance: Tensor | None  # [n, queries, keys] int32: difference of positions
    bucket: Tensor | None  # [n, queries, keys] int32: of the difference in time
    blocked: Tensor | None  # [n, 1, queries, keys] bool; None: blocked above the diagonal only


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """The plan of the reference. Its `times` are the timestamps, int64."""

    groups: Groups
    rows: int = TILE_ROWS
    budget: int = TILE_BUDGET
    kept: dict[int, list[Relation]] = field(default_factory=dict)  # by group; empty above a budget
    pairs: Pairs | None = None  # of all tokens, if they are few; then there are no groups
    bucket: Tensor | None = None  # [pairs] int32: of their difference in time
    # [samples] queries before these are left out, if all of a group's samples do
    first: Sequence[int] | None = None

    def tiles(self, number: int) -> Iterator[Relation]:
        """Yields the tiles of a group, from the bottom up: the first has all keys."""
        if number in self.kept:
            yield from self.kept[number]
            return
        group = self.groups.groups[number]
        positions, times = self._find_coordinates(group)
        per_row = len(group) * self.heads * group.length
        rows = max(1, min(self.rows, self.budget // per_row))
        first = 0
        if self.first is not None:
            first = min(self.first[sample] for sample in group.samples.tolist())
        for stop in range(group.length, first, -rows):
            yield self._relate(group, max(first, stop - rows), stop, positions, times)

    def _find_coordinates(self, group: Group) -> tuple[Tensor, Tensor | None]:
        """Positions [n or 1, length] and times [n, length] of a group's slots."""
        positions = torch.arange(group.length, device=group.slots.device)[None]
        if self.candidate_counts is not None:  # all candidates come right after the history
            history = self.lengths[group.samples] - self.candidate_counts[group.samples]
            positions = torch.minimum(positions, history[:, None])
        return positions, None if self.times is None else group.pad(self.times)

    def _relate(
        self, group: Group, start: int, stop: int, positions: Tensor, times: Tensor | None
    ) -> Relation:
        distance, bucket = None, None
        if self.distances:
            apart = positions[:, start:stop, None] - positions[:, None, :stop]
            distance = apart.clamp_(min=0).to(torch.int32)
        if times is not None:
            bucket = find_buckets(times[:, start:stop, None] - times[:, None, :stop], self.buckets)
        blocked = None
        slots = torch.arange(stop, device=positions.device)
        if self.candidate_counts is not None:
            history = self.lengths[group.samples] - self.candidate_counts[group.samples]
            after = slots[None, :] > slots[start:stop, None]  # [queries, keys]
            other = slots[None, :] != slots[start:stop, None]
            candidate = slots[None, :] >= history[:, None]  # [n, keys]
            blocked = (after | (other & candidate[:, None]))[:, None]
        if self.visible is not None:
            if blocked is None:
                blocked = (slots[None, :] > slots[start:stop, None])[None, None]
            apart = positions[:, start:stop, None] - positions[:, None, :stop]
            blocked = blocked | self.visible.hides(apart, slots)[:, None]
        return Relation(start, stop, distance, bucket, blocked)


def find_buckets(elapsed: Tensor, buckets: int) -> Tensor:
    """Differences in time -> buckets, int32, of the same shape. Overwrites the differences."""
    # float64: integers next to a bucket's edge fall on the same side on every device
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
    visible: Visible | None = None,
    first: Sequence[int] | None = None,
) -> AttentionPlan:
    """Plans the attention for these lengths. Reads the device unless `host` has the sizes.

    Args:
        lengths: [samples] int64, candidates included.
        heads: Number of heads.
        candidate_counts: [samples] int64.
        timestamps: [tokens] int64, for a time bias.
        buckets: Of the time bias.
        distances: Whether there is a position bias.
        budget: Most scores of a tile.
        rows: Most queries of a tile.
        host: The sizes on the host.
        list_few: Whether a CPU lists the pairs of tokens, if they have few scores.
        listed_scores: What counts as few; by default `LISTED_SCORES`.
        visible: What a token sees of those before it; None: all.
        first: [samples] the first query of each that counts.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, not {rows}")
    sizes = read_batch(lengths, heads, candidate_counts, timestamps, host)
    tokens = int(sizes.lengths.sum())
    few = min(LISTED_SCORES if listed_scores is None else listed_scores, budget)
    listed = (
        list_few and lengths.device.type == "cpu" and heads * count_pairs(sizes, visible) <= few
    )
    groups = (
        Groups((), lengths, sizes.lengths, tokens)
        if listed
        else Groups.of(lengths, lambda length: heads * length * length, budget, sizes.lengths)
    )
    pairs = list_pairs(sizes, visible) if listed else None
    bucket = None
    if pairs is not None and timestamps is not None:
        elapsed = timestamps.index_select(0, pairs.query) - timestamps.index_select(0, pairs.key)
        bucket = find_buckets(elapsed, buckets)
    plan = AttentionPlan(
        lengths, heads, tokens, candidate_counts, timestamps, buckets, distances,
        sizes.longest_history, sizes.longest_distance, visible, groups, rows, budget, {}, pairs,
        bucket, first,
    )  # fmt: skip
    if sum(len(group) * group.length**2 for group in groups.groups) <= RELATION_BUDGET:
        plan.kept.update((n, list(plan.tiles(n))) for n in range(len(groups.groups)))
    return plan
