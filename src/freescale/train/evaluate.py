"""Evaluation over all ranks: retrieval against the full catalogue, ranking by NE and AUC.

Every rank scores all queries of a batch against its own part of the item table; the target's score
and the number of better items are summed over ranks. No rank ever holds the whole table, and
nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.embedding.parallelize import ShardedModel
from freescale.train.metrics import area_under_curve, normalized_entropy, ranking_quality
from freescale.transport.api import Transport

_SCORE_ELEMENTS = 1 << 24  # scores held at a time


def _evaluated(
    parallel: ShardedModel, data: Iterable[SequenceBatch], visit: Callable[[SequenceBatch], None]
) -> None:
    """Visits batches with the model in evaluation mode and the batch's rows fetched. All ranks have
    equally many batches."""
    tables, module = parallel.tables, parallel.module
    tables.settle()
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            for batch in data:
                tables.check(batch, strict=False)
                batch = batch.to(parallel.transport.device)
                tables.fetch(tables.request([batch]), train=False)
                visit(batch)
                tables.release()
    finally:
        tables.release()
        module.train(training)


def _gather_rows(tensor: Tensor, transport: Transport) -> tuple[Tensor, list[int]]:
    """tensor [n, ...] with another n on each rank -> all rows in rank order, and each rank's n."""
    sizes = (
        transport.all_gather(torch.tensor([tensor.shape[0]], device=tensor.device), "counts")
        .wait()
        .view(-1)
        .tolist()
    )
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = transport.all_gather(padded, "rows").wait()
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]), sizes


def better_items(scores: Tensor, ids: Tensor, target_scores: Tensor, targets: Tensor) -> Tensor:
    """scores [q, n] of items ids [n] -> [q]: how many rank before the target. Of equal scores the
    target is last.

    So a model that scores all items alike ranks last, whatever the order of the ids. Counts what is
    not worse, so that a score that is not a number puts the target behind it, never before.
    """
    worse = scores < target_scores[:, None]
    return (~worse & (ids[None, :] != targets[:, None])).sum(dim=1)


def evaluate_retrieval(
    parallel: ShardedModel,
    data: Iterable[SequenceBatch],
    *,
    table: str = "item",
    popularity: Tensor | None = None,
) -> dict[str, dict[str, float]]:
    """{"model": metrics, "popularity": metrics}: ranks of dense["target"] in the full catalogue.
    The same on every rank.

    `popularity` [rows]: how often the training part holds each item; the baseline that recommends
    the most popular to all. Of equal scores, and of equally popular items, the target ranks last.
    """
    transport = parallel.transport
    parallel.tables.settle()
    ids, rows = parallel.tables.get_local_rows(table)
    module = parallel.module
    with torch.no_grad():
        was = module.training
        module.eval()
        catalogue = module.encode_items(rows)  # type: ignore[operator]  # [n, width]
        module.train(was)
    # In its own dtype: rounded counts would tie, and ties would make the baseline look worse than
    # it is.
    counts = popularity.to(ids.device)[ids] if popularity is not None else None
    ranks: list[Tensor] = []
    popular: list[Tensor] = []

    def visit(batch: SequenceBatch) -> None:
        valid = batch.weights["next_item"] > 0 if len(batch) else None
        if valid is not None:
            queries, targets = module.encode_queries(batch)[valid], batch.dense["target"][valid]  # type: ignore[operator]
        else:
            queries = catalogue.new_zeros(0, catalogue.shape[1])
            targets = torch.zeros(0, dtype=torch.int64, device=transport.device)
        queries, _ = _gather_rows(queries.to(catalogue.dtype), transport)
        targets, _ = _gather_rows(targets, transport)
        for part, goal in zip(
            _chunks(queries, ids.numel()), _chunks(targets, ids.numel()), strict=True
        ):
            ranks.append(_ranks(part @ catalogue.T, ids, goal, transport))
            if counts is not None:
                popular.append(_ranks(counts.expand(goal.numel(), -1), ids, goal, transport))

    _evaluated(parallel, data, visit)
    results = {"model": ranking_quality(torch.cat(ranks).cpu())} if ranks else {"model": {}}
    if popular:
        results["popularity"] = ranking_quality(torch.cat(popular).cpu())
    return results


def _chunks(tensor: Tensor, items: int) -> tuple[Tensor, ...]:
    return tensor.split(max(1, _SCORE_ELEMENTS // max(1, items)))


def _ranks(scores: Tensor, ids: Tensor, targets: Tensor, transport: Transport) -> Tensor:
    """scores [q, n] on this rank's items -> rank [q] of each target among the items of all ranks, 1
    = best."""
    mine = ids[None, :] == targets[:, None]  # [q, n]: true once, on the rank that has the target
    found = torch.where(mine, scores, torch.zeros_like(scores)).sum(dim=1)
    goal = transport.all_reduce(found, "counts").wait()
    return transport.all_reduce(better_items(scores, ids, goal, targets), "counts").wait() + 1


def evaluate_ranking(
    parallel: ShardedModel, data: Iterable[SequenceBatch], tasks: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """{"model": {"ne/task": ..., "auc/task": ...}} over all candidates of all ranks."""
    transport = parallel.transport
    predictions: list[Tensor] = []
    labels: list[Tensor] = []

    def visit(batch: SequenceBatch) -> None:
        if len(batch):
            guess = parallel.module.predict(batch).float()  # type: ignore[operator]
            truth = batch.sequences["labels"].values.float()
        else:
            guess = truth = torch.zeros(0, len(tasks), device=transport.device)
        predictions.append(_gather_rows(guess, transport)[0].cpu())
        labels.append(_gather_rows(truth, transport)[0].cpu())

    _evaluated(parallel, data, visit)
    if not predictions:
        return {"model": {}}
    guesses, truths = torch.cat(predictions), torch.cat(labels)
    result: dict[str, float] = {}
    for column, task in enumerate(tasks):
        result[f"ne/{task}"] = normalized_entropy(guesses[:, column], truths[:, column])
        result[f"auc/{task}"] = area_under_curve(guesses[:, column], truths[:, column])
    return {"model": result}
