"""Retrieval against the full catalogue, over all ranks: among all items, and among those that the
history does not hold.

Every rank scores all queries of a batch against its own part of the item table; the target's score
and the numbers of better items, all of them and those of the history, are summed over ranks. No
rank ever holds the whole table, nothing is sampled, and nothing is scored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from freescale.batch import Jagged, SequenceBatch
from freescale.config.metrics import COLD, COLD_EVENTS, COLD_TARGETS, REPEATS, UNSEEN
from freescale.data.batches.specs import Features
from freescale.embedding.sharded_model import ShardedModel, evaluation_mode
from freescale.kernels.softmax.scores import (
    choose_tile,
    count_better,
    score_targets,
    split_queries,
)
from freescale.train.evaluate import MISS, gather_rows, ranking_quality, visit_batches
from freescale.train.sample_ranks import SampleRanks
from freescale.transport.api import Transport

Popularity = Callable[[Tensor], Tensor]  # ids [n] -> counts [n]

_AT_ONCE = 1 << 16  # items whose features are fetched at a time


def evaluate_retrieval(
    parallel: ShardedModel,
    data: Iterable[SequenceBatch],
    *,
    popularity: Popularity | None = None,
    keep: SampleRanks | None = None,
    features: Features | None = None,
) -> dict[str, dict[str, float]]:
    """{"model": metrics, "popularity": metrics}: ranks of dense["target"] in the full catalogue.
    The same on every rank.

    Metrics are HR@k, NDCG@k and MRR among all items ("hr@10") and without the items of the sample's
    history ("hr@10/unseen"), and "repeats", the share of targets that are in the history. With the
    baseline, also those of cold targets, with at most 5 training events, among all items
    ("hr@10/cold"), and "cold", their share. The target itself is never left out. Among equal scores
    or counts, the target ranks last. A target that cannot be recommended is a miss in every metric:
    for the model one without a row in a dynamic table, for the baseline also one that is not in the
    training part.

    Args:
        parallel: A sharded Retrieval model.
        data: This rank's batches; all ranks have equally many.
        popularity: Occurrences of each item in the training part, for the baseline.
        keep: Receives the target's rank for each sample.
        features: Of the items, if the model has any.
    """
    transport, module = parallel.transport, parallel.module
    parallel.tables.lease.flush()
    ids, rows = parallel.tables.get_local_rows("item")
    with torch.no_grad(), evaluation_mode(module):
        # Scores are computed on the device, wherever the rows are stored.
        catalogue = encode_catalogue(parallel, ids, rows.to(transport.device), features)
    place, dynamic = _PlaceFinder(ids), parallel.tables.specs["item"].dynamic is not None
    # on every rank, whatever it owns
    tile = choose_tile(-(-parallel.tables.specs["item"].rows // transport.world))
    baseline = None if popularity is None else _Popularity(popularity(ids))
    ranks: list[Tensor] = []  # [2, q] each: among all items, among the unseen
    popular: list[Tensor] = []  # likewise
    cold: list[Tensor] = []  # [q] each: whether the target has few training events
    repeats: list[Tensor] = []

    def add_up(mine: Tensor) -> Tensor:
        return transport.all_reduce(mine, "counts").wait()

    def visit(batch: SequenceBatch) -> None:
        queries, targets, past = _gather_samples(module, batch, catalogue, transport)
        history, there = _pad(past, targets)
        if keep is not None:
            own = batch.weights["next_item"] if len(batch) else targets.new_zeros(0)
            keep.there.append(gather_rows((own > 0).long(), transport))
            keep.history.append(past.lengths)
            keep.targets.append(targets)
        repeats.append(((history == targets[:, None]) & there).any(1))
        listed, kept = _list_seen(history, targets)
        places, seen = place.find(targets), torch.where(kept, place.find(listed), -1)
        owners = add_up((places >= 0).long()) if dynamic else torch.ones_like(places)
        for part, own, others, owned in split_queries(queries, places, seen, owners):
            goals = add_up(score_targets(part, catalogue, own, tile=tile))
            counts = count_better(part, catalogue, own, goals, tile=tile, seen=others)
            ranks.append(_to_ranks(add_up(torch.stack(counts)), owned > 0))
        if baseline is not None:
            occurrences = add_up(baseline.score_targets(places))
            counts = baseline.count_better(places, occurrences, seen)
            popular.append(_to_ranks(add_up(torch.stack(counts)), occurrences > 0))
            cold.append(occurrences <= COLD_EVENTS)

    visit_batches(parallel, data, visit)
    if keep is not None:
        keep.ranks.extend(ranks)
    found = torch.cat(repeats).double() if repeats else torch.zeros(0)
    if not found.numel():
        return {"model": {}}
    results = {"model": _measure(ranks) | {REPEATS: found.mean().item()}}
    if popular:
        results["popularity"] = _measure(popular)
        rare = torch.cat(cold)
        quality = ranking_quality(torch.cat(ranks, 1)[0, rare].cpu())
        results["model"] |= {name + COLD: value for name, value in quality.items()}
        results["model"] |= {COLD_TARGETS: rare.double().mean().item()}
    return results


def encode_catalogue(
    parallel: ShardedModel, ids: Tensor, rows: Tensor, features: Features | None
) -> Tensor:
    """[n, width]: this rank's items [n] as the loss sees them. A collective."""
    module: Any = parallel.module
    if getattr(module, "item_features", None) is None:
        return module.encode_items(rows)  # type: ignore[no-any-return]
    if features is None:
        raise ValueError("the model has features of items: pass them, as `features`")
    counts = parallel.transport.all_gather(torch.tensor([len(ids)], device=rows.device), "counts")
    found = []
    for first in range(0, int(counts.wait().max()), _AT_ONCE):  # as many on every rank
        part = slice(first, first + _AT_ONCE)
        wanted = ids[part].cpu()
        codes, own = features.find_items(wanted)
        vectors = features.find_vectors(wanted).to(rows.device) if features.vector_widths else None
        batch = parallel.check_batch(SequenceBatch(dense={"history_features": codes}))
        with parallel.rows_fetched(batch):
            codes = batch.values("history_features")
            found.append(module.encode_items(rows[part], codes, own.to(rows.device), vectors))
    return torch.cat(found) if found else rows


def _gather_samples(
    module: nn.Module, batch: SequenceBatch, catalogue: Tensor, transport: Transport
) -> tuple[Tensor, Tensor, Jagged]:
    """Queries [q, width], targets [q] and histories of all ranks' samples that have a target."""
    if len(batch):
        # the samples with a target, read from the device once a batch
        (kept,) = (batch.weights["next_item"] > 0).nonzero(as_tuple=True)
        queries = module.encode_queries(batch)[kept]  # type: ignore[operator]
        targets, history = batch.dense["target"][kept], batch.sequences["history"].select(kept)
    else:
        queries = catalogue.new_zeros(0, catalogue.shape[1])
        targets = torch.zeros(0, dtype=torch.int64, device=transport.device)
        history = Jagged(targets, targets)
    queries = gather_rows(queries.to(catalogue.dtype), transport)
    targets = gather_rows(targets, transport)
    lengths, items = (gather_rows(part, transport) for part in (history.lengths, history.values))
    return queries, targets, Jagged(items, lengths)


def _pad(history: Jagged, targets: Tensor) -> tuple[Tensor, Tensor]:
    """[samples, longest], padded with the target, since every number may be an id; and a mask of
    the history."""
    lengths, tokens = history.lengths, history.values.shape[0]
    longest = int(lengths.max()) if len(lengths) else 0
    padded = targets[:, None].repeat(1, longest)
    numbers = torch.arange(len(lengths), device=lengths.device)
    owner = torch.repeat_interleave(numbers, lengths, output_size=tokens)
    column = torch.arange(tokens, device=lengths.device) - history.offsets[owner]
    padded[owner, column] = history.values
    return padded, torch.arange(longest, device=lengths.device) < lengths[:, None]


def _list_seen(history: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The items of each history [q, longest], and a mask that selects each once, without the
    target."""
    ordered = history.sort(dim=1).values
    known = ordered == targets[:, None]
    known[:, 1:] |= ordered[:, 1:] == ordered[:, :-1]
    return ordered, ~known


def _to_ranks(better: Tensor, known: Tensor) -> Tensor:
    """Numbers of better items [2, q], of all and of the history -> ranks [2, q], among all and
    among the unseen; `MISS` for targets that are not `known` [q]."""
    return torch.where(known, torch.stack([better[0], better[0] - better[1]]) + 1, MISS)


def _measure(ranks: list[Tensor]) -> dict[str, float]:
    among_all, among_unseen = torch.cat(ranks, 1).cpu()
    unseen = ranking_quality(among_unseen)
    return ranking_quality(among_all) | {name + UNSEEN: value for name, value in unseen.items()}


class _PlaceFinder:
    """Finds ids among the ids [n] of this rank's rows."""

    def __init__(self, ids: Tensor) -> None:
        self._ordered, self._order = ids.sort()

    def find(self, wanted: Tensor) -> Tensor:
        """wanted [...] -> their places [...], -1 if missing."""
        if not self._ordered.numel():
            return torch.full_like(wanted, -1)
        found = torch.searchsorted(self._ordered, wanted).clamp_(max=self._ordered.numel() - 1)
        return torch.where(self._ordered[found] == wanted, self._order[found], -1)


class _Popularity:
    """The baseline that gives every query the same scores, by this rank's counts [n].

    They stay integers: rounded counts would tie, and ties would make the baseline look worse than
    it is.
    """

    def __init__(self, counts: Tensor) -> None:
        self._counts, self._ordered = counts, counts.sort().values

    def score_targets(self, places: Tensor) -> Tensor:
        """Counts of the items at places [...]; 0 for items of other ranks."""
        if not self._counts.numel():
            return torch.zeros_like(places, dtype=self._counts.dtype)
        return torch.where(places >= 0, self._counts[places.clamp(min=0)], 0)

    def count_better(self, places: Tensor, goals: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Like `scores.count_better`."""
        not_less = len(self._counts) - torch.searchsorted(self._ordered, goals)
        ahead = (self.score_targets(seen) >= goals[:, None]) & (seen >= 0)
        return not_less - (places >= 0).long(), ahead.sum(1)
