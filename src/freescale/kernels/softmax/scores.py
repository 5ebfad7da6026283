"""Scores of queries against a catalogue, a tile at a time: target scores and rank counts.

[queries, items] never exists. Every product has the same shape, with the last tile padded by zeros.
So items with equal rows get equal scores anywhere in the catalogue and in any part of it: ties are
ties. Nothing here is specific to a device: the products are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

TILE_ITEMS = 1 << 14
CPU_QUERIES, GPU_QUERIES = 1 << 6, 1 << 10  # with a tile of items: a core's cache; 64 MB


def choose_tile(items: int) -> int:
    """The items of a tile, for a catalogue whose largest part has `items` items. All parts of a
    catalogue must use the same tile."""
    return max(GPU_QUERIES, min(TILE_ITEMS, -(-items // 64) * 64))


def split_queries(*columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Splits columns [q, ...] into parts for the functions below."""
    size = GPU_QUERIES if columns[0].is_cuda else CPU_QUERIES
    return zip(*(torch.split(column, size) for column in columns), strict=True)


def score_targets(queries: Tensor, items: Tensor, places: Tensor, *, tile: int) -> Tensor:
    """Scores each query's target.

    Args:
        queries: [q, width], a part of `split_queries`.
        items: [n, width].
        places: [q] int64: places of the targets among the items; -1: elsewhere.
        tile: From `choose_tile`.

    Returns:
        [q], 0 for a target that is elsewhere; the same bits as in the other functions.
    """
    here = places >= 0
    if not items.shape[0]:
        return queries.new_zeros(len(places))
    rows = items.index_select(0, places.clamp(min=0))
    scores = queries @ _fill(rows, tile).T
    return torch.where(here, scores[:, : len(places)].diagonal(), 0)


def count_better(
    queries: Tensor,
    items: Tensor,
    places: Tensor,
    target_scores: Tensor,
    *,
    tile: int,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Counts the items that rank before each query's target, among all items and among a list for
    each query. Among equal scores the target is last.

    So a model that scores all items alike ranks last, whatever the order of the items. Every item
    that is not worse counts: a NaN score puts the target last, never first.

    Args:
        queries: [q, width], a part of `split_queries`.
        items: [n, width].
        places: [q] int64: places of the targets, which do not count; -1: elsewhere.
        target_scores: [q].
        tile: From `choose_tile`.
        seen: [q, s] int64: for each query, places of distinct items other than the target;
            negative ones are skipped. This computes no more scores.

    Returns:
        ([q] int64 of all items, [q] int64 of those in `seen`).
    """
    better, of_seen = torch.zeros_like(places), torch.zeros_like(places)
    for start, scores in score_tiles(queries, items, tile):
        ahead = ~(scores < target_scores[:, None])
        better += ahead.sum(1) - _look_up(ahead, places[:, None], start)
        if seen is not None:
            of_seen += _look_up(ahead, seen, start)
    return better, of_seen


def _look_up(marks: Tensor, places: Tensor, start: int) -> Tensor:
    """[q]: counts the places [q, s] with a mark in the tile that begins at `start`, marks [q, t].
    Places outside the tile do not count."""
    inner = places - start
    inside = (inner >= 0) & (inner < marks.shape[1])  # -1 is before every tile
    return (marks.gather(1, torch.where(inside, inner, 0)) & inside).sum(1)


def score_tiles(queries: Tensor, items: Tensor, tile: int) -> Iterator[tuple[int, Tensor]]:
    """(place of the first item, scores [q, up to `tile`]) of each tile."""
    for start in range(0, items.shape[0], tile):
        rows = items[start : start + tile]
        yield start, (queries @ _fill(rows, tile).T)[:, : len(rows)]


def _fill(rows: Tensor, size: int) -> Tensor:
    """Pads rows [up to size, width] with zeros to [size, width]."""
    return rows if len(rows) == size else F.pad(rows, (0, 0, 0, size - len(rows)))
