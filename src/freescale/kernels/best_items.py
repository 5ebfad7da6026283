"""The best items of each query, exactly, over tiles of the catalogue.

[queries, items] never exists. Among equal scores the item that comes first in the catalogue is
first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from freescale.batch import Jagged
from freescale.kernels.native import address, load_native
from freescale.kernels.softmax.scores import score_tiles

_GROUP = 64  # items that are compared by their best one
# (queries, items) of a product. On a CPU it stays in a core's cache; on a GPU it takes 512 MB.
_CPU_PRODUCT, _GPU_PRODUCT = (256, 1 << 10), (1 << 10, 1 << 17)
_WIDER = 8


def find_best(
    queries: Tensor, items: Tensor, k: int, *, left_out: Jagged | None = None
) -> tuple[Tensor, Tensor]:
    """The k items with the highest scores, all if there are fewer, of queries [q, width] among
    items [n, width]: (scores [q, k], falling; places of the items [q, k] int64). `left_out`: for
    each query, places of items to leave out, on the CPU; negative ones are skipped. Items that are
    left out, and scores that are NaN, come last, with a score of -inf and no place in
    particular."""
    k = min(k, items.shape[0])
    size, tile = _GPU_PRODUCT if queries.is_cuda else _CPU_PRODUCT
    # few queries: fewer and wider products, up to where padding the last one counts
    tile *= min(_WIDER, max(1, size // max(len(queries), 1)))
    tile = min(tile, -(-max(items.shape[0], 1) // _GROUP) * _GROUP)
    library = None if queries.is_cuda else load_native()
    found = []
    for first in range(0, max(len(queries), 1), size):
        part, out = queries[first : first + size], None
        if left_out is not None:
            out = left_out.slice(first, first + len(part))
        leave_out = _LeaveOut(out, queries.device)
        if library is not None and queries.dtype == torch.float32:
            found.append(_find_in_heaps(library, part, items, k, tile, leave_out))
        else:
            found.append(_find_by_keys(part, items, k, tile, leave_out))
    scores, places = zip(*found)
    return torch.cat(scores), torch.cat(places)


def _find_in_heaps(
    library: Any, queries: Tensor, items: Tensor, k: int, tile: int, leave_out: _LeaveOut
) -> tuple[Tensor, Tensor]:
    """In C: each score is compared with the worst of the k best so far."""
    best = torch.full((len(queries), k), -torch.inf)
    places = torch.zeros(len(queries), k, dtype=torch.int64)
    for start, scores in score_tiles(queries, items, tile):
        scores = leave_out.mark(scores.contiguous(), start)
        sizes = len(queries), scores.shape[1], start, k
        tensors = map(address, (scores, best, places))
        library.keep_best(*sizes, *tensors, torch.get_num_threads())
    order = places.argsort(dim=1, stable=True)
    best, places = best.gather(1, order), places.gather(1, order)
    order = best.argsort(dim=1, descending=True, stable=True)
    return best.gather(1, order), places.gather(1, order)


def _find_by_keys(
    queries: Tensor, items: Tensor, k: int, tile: int, leave_out: _LeaveOut
) -> tuple[Tensor, Tensor]:
    """In torch alone. Of each tile, the k groups with the best items hold the k best items."""
    best = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for start, scores in score_tiles(queries, items, tile):
        scores = leave_out.mark(scores, start)
        short = -scores.shape[1] % _GROUP
        groups = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
        groups = groups.view(len(queries), -1, _GROUP)
        numbers = torch.arange(groups.shape[1], device=scores.device)
        leaders = _make_keys(groups.amax(2), numbers)
        chosen = _get_places(leaders.topk(min(k, leaders.shape[1]), dim=1).values)
        found = groups.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP))
        members = torch.arange(_GROUP, device=scores.device)
        places = start + chosen[:, :, None] * _GROUP + members
        keys = torch.cat([best, _make_keys(found, places).flatten(1)], 1)
        best = keys.topk(min(k, keys.shape[1]), dim=1).values
    return _get_scores(best), _get_places(best)


class _LeaveOut:
    """Puts -inf in place of the scores of items to leave out."""

    def __init__(self, left_out: Jagged | None, device: torch.device) -> None:
        self._places = None
        if left_out is None:
            return
        numbers = torch.arange(len(left_out))
        owner = numbers.repeat_interleave(left_out.lengths, output_size=len(left_out.values))
        order = left_out.values.argsort()
        self._places = left_out.values[order]  # on the host: which of them are in a tile
        self._rows, self._columns = owner[order].to(device), self._places.to(device)

    def mark(self, scores: Tensor, start: int) -> Tensor:
        """Changes scores [q, t] of the items from `start` on."""
        if self._places is not None:
            ends = torch.tensor([start, start + scores.shape[1]])
            first, last = torch.searchsorted(self._places, ends).tolist()
            if last > first:
                scores[self._rows[first:last], self._columns[first:last] - start] = -torch.inf
        return scores


_LOW = (1 << 32) - 1


def _make_keys(scores: Tensor, places: Tensor) -> Tensor:
    """int64 keys in the order of (score, then the lower place); no two are equal."""
    scores = scores.float().masked_fill(scores.isnan(), -torch.inf) + 0.0  # no negative zero
    bits = scores.view(torch.int32).long()
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered << 32) | (_LOW - places)


def _get_places(keys: Tensor) -> Tensor:
    return _LOW - (keys & _LOW)


def _get_scores(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    return torch.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).view(torch.float32)
