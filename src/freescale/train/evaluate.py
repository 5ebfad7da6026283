"""Evaluation over all ranks: any model by your own measures (`evaluate`), ranking by NE, AUC and
GAUC. For retrieval see evaluate_retrieval.py."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.config.metrics import CUTOFFS
from freescale.embedding.sharded_model import ShardedModel, evaluation_mode
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import raise_together

MISS = 0  # in place of a rank: the target is not in the catalogue


def ranking_quality(ranks: Tensor) -> dict[str, float]:
    """HR@k and NDCG@k for every k of `CUTOFFS`, and MRR, from the rank [n] (1 = best, or `MISS`) of
    each target in the catalogue."""
    if not ranks.numel():
        return {}
    ranks = torch.where(ranks == MISS, torch.inf, ranks.double())
    gain = 1 / torch.log2(ranks + 1)
    hits = {k: ranks <= k for k in CUTOFFS}
    return {
        **{f"hr@{k}": hit.double().mean().item() for k, hit in hits.items()},
        **{f"ndcg@{k}": torch.where(hit, gain, 0.0).mean().item() for k, hit in hits.items()},
        "mrr": (1 / ranks).mean().item(),
    }


def normalized_entropy(predictions: Tensor, labels: Tensor) -> float:
    """Cross entropy of the predictions [n] over that of always predicting the mean label; below 1
    is better than that."""
    predictions, labels = predictions.double().clamp(1e-12, 1 - 1e-12), labels.double()
    mean = labels.mean().item()
    if not 0 < mean < 1:
        return math.nan
    entropy = -(labels * predictions.log() + (1 - labels) * (1 - predictions).log()).mean().item()
    return entropy / -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))


def area_under_curve(predictions: Tensor, labels: Tensor) -> float:
    """AUC by ranks; ties count half. NaN if a prediction is NaN, or all labels are equal."""
    positives = labels > 0.5
    count, total = int(positives.sum()), labels.numel()
    if count in (0, total) or predictions.isnan().any():
        return math.nan
    _, inverse, sizes = torch.unique(predictions, return_inverse=True, return_counts=True)
    middle = sizes.cumsum(0) - (sizes.double() - 1) / 2  # mean rank of each tied value
    rank_sum: float = middle[inverse][positives].sum().item()
    return (rank_sum - count * (count + 1) / 2) / (count * (total - count))


def group_area_under_curve(predictions: Tensor, labels: Tensor, counts: Tensor) -> float:
    """GAUC: the mean of each user's AUC, weighted by the user's candidates. Users whose candidates
    are all of one class do not count. NaN if no user counts, or a prediction is NaN.

    Args:
        predictions: [n], user by user.
        labels: [n] 0 or 1.
        counts: [users] int64: candidates of each.
    """
    if predictions.isnan().any():
        return math.nan
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    order = predictions.argsort()
    order = order[owner[order].argsort(stable=True)]  # by user, then by prediction
    ordered = predictions[order]
    new = torch.ones_like(owner)  # a value, or a user
    new[1:] = (ordered[1:] != ordered[:-1]) | (owner[1:] != owner[:-1])
    run = new.cumsum(0)
    sizes = torch.bincount(run)
    middle = sizes.cumsum(0) - (sizes.double() - 1) / 2  # mean rank of each tied value
    ranks = middle[run] - (counts.cumsum(0) - counts)[owner]  # within the user
    positives = (labels[order] > 0.5).double()
    positive = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, owner, positives)
    rank_sum = torch.zeros_like(positive).index_add_(0, owner, ranks * positives)
    pairs_of = positive * (counts - positive)  # one of each class
    both = pairs_of > 0
    areas = (rank_sum - positive * (positive + 1) / 2)[both] / pairs_of[both]
    weights = counts[both]
    return (areas * weights).sum().item() / weights.sum().item() if both.any() else math.nan


# Measures of a batch by name: one value per sample [n], or (sum, weight).
Measures = Mapping[str, Tensor | tuple[Tensor | float, Tensor | float]]


def evaluate(
    model: ShardedModel,
    batches: Iterable[SequenceBatch],
    fn: Callable[[SequenceBatch, Any], Measures] | None = None,
) -> dict[str, float]:
    """Means over the samples of all ranks, with the model in evaluation mode and without gradients.

    Works before the first step and between the steps of a pipeline, whose deferred gradients are
    applied first. Afterwards every submodule is in the mode that it was in. A collective: ranks may
    have different numbers of batches, and none.

    Args:
        model: the result of `parallelize`.
        batches: this rank's batches. Features that only training needs may be missing.
        fn: `fn(batch, output)` receives a batch on the model's device and the model's output, and
            returns measures by name: one value per sample ([n]; the mean over all samples) or a
            pair (sum, weight) of scalars (sums divided by weights). None: the mean loss of each
            task, from the sums that the model returns and the weights of the batch.

    Returns:
        The mean of each measure over all batches of all ranks, the same on every rank; not a number
        where the weight is 0. Empty if no rank has a sample.

    Raises:
        TypeError, ValueError: a batch or a measure of this rank has the wrong form.
        RemoteError: the data, the model or `fn` failed on another rank.
    """
    transport = model.transport
    measure = fn if fn is not None else _measure_losses
    source = iter(batches)
    totals: dict[str, Tensor] = {}  # (sum, weight) of each measure, float64
    error: Exception | None = None
    ended = False
    with evaluation_mode(model.module), torch.no_grad():
        while True:
            batch = SequenceBatch()
            try:
                if not ended and error is None:
                    taken = next(source, None)
                    ended = taken is None
                    batch = model.check_batch(taken) if taken is not None else batch
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
            state = b"failed" if error is not None else b"ended" if ended else b"ready"
            states = transport.gather_bytes(state)
            if b"failed" in states:
                raise_together(error, transport)
            if b"ready" not in states:
                break
            with model.rows_fetched(batch):
                try:
                    if len(batch):
                        _add_measures(totals, measure(batch, model.module(batch)), len(batch))
                except Exception as caught:  # noqa: BLE001 - raised on all ranks, in the next round
                    error = caught
    return _merge_totals(totals, transport)


def _measure_losses(batch: SequenceBatch, output: Any) -> Measures:
    if not isinstance(output, Mapping) or set(output) != set(batch.weights):
        returned = sorted(output) if isinstance(output, Mapping) else type(output).__name__
        raise ValueError(
            f"the model returned {returned} and the batch has weights for "
            f"{sorted(batch.weights)}: give evaluate an fn(batch, output) that returns measures"
        )
    return {task: (output[task], weight.sum()) for task, weight in batch.weights.items()}


def _add_measures(totals: dict[str, Tensor], measures: Measures, samples: int) -> None:
    if not isinstance(measures, Mapping):
        raise TypeError(
            f"fn(batch, output) returned a {type(measures).__name__}: return a dict of measures, "
            "each [samples] or (sum, weight)"
        )
    for name, value in measures.items():
        if isinstance(value, Tensor) and value.shape == (samples,):
            value = value.double().sum(), samples
        if not (isinstance(value, tuple) and len(value) == 2):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"measure {name!r} is {shape}: return one value for each of the {samples} samples, "
                "or a pair (sum, weight)"
            )
        pair = torch.stack([torch.as_tensor(part).double().cpu().reshape(()) for part in value])
        totals[name] = totals.get(name, torch.zeros(2, dtype=torch.float64)) + pair


def _merge_totals(totals: Mapping[str, Tensor], transport: Transport) -> dict[str, float]:
    """Adds up in the order of ranks, so that all ranks round alike."""
    mine = {name: total.tolist() for name, total in totals.items()}
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for theirs in gather_json(transport, mine):
        for name, (value, weight) in theirs.items():
            sums[name] += value
            weights[name] += weight
    return {n: sums[n] / weights[n] if weights[n] else float("nan") for n in sorted(sums)}


def visit_batches(
    parallel: ShardedModel, data: Iterable[SequenceBatch], visit: Callable[[SequenceBatch], None]
) -> None:
    """Visits batches with the model in evaluation mode and the batch's rows fetched. All ranks have
    equally many batches."""
    with evaluation_mode(parallel.module), torch.no_grad():
        for batch in data:
            batch = parallel.check_batch(batch)
            with parallel.rows_fetched(batch):
                visit(batch)


def gather_rows(tensor: Tensor, transport: Transport) -> Tensor:
    """tensor [n, ...] with another n on each rank -> all rows in rank order."""
    mine = torch.tensor([tensor.shape[0]], device=tensor.device)
    sizes = transport.all_gather(mine, "counts").wait().view(-1).tolist()
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = transport.all_gather(padded, "rows").wait()
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def evaluate_ranking(
    parallel: ShardedModel, data: Iterable[SequenceBatch], tasks: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """{"model": {"ne/task": ..., "auc/task": ..., "gauc/task": ...}} over all candidates of all
    ranks; a sample is a user."""
    transport = parallel.transport
    predictions: list[Tensor] = []
    labels: list[Tensor] = []
    counts: list[Tensor] = []  # candidates of each user

    def visit(batch: SequenceBatch) -> None:
        if len(batch):
            guess = parallel.module.predict(batch).float()  # type: ignore[operator]
            truth = batch.sequences["labels"].values.float()
            count = batch.sequences["labels"].lengths
        else:
            guess = truth = torch.zeros(0, len(tasks), device=transport.device)
            count = torch.zeros(0, dtype=torch.int64, device=transport.device)
        for found, mine in ((predictions, guess), (labels, truth), (counts, count)):
            found.append(gather_rows(mine, transport).cpu())

    visit_batches(parallel, data, visit)
    if not predictions:
        return {"model": {}}
    guesses, truths, users = torch.cat(predictions), torch.cat(labels), torch.cat(counts)
    result: dict[str, float] = {}
    for column, task in enumerate(tasks):
        guess, truth = guesses[:, column], truths[:, column]
        result[f"ne/{task}"] = normalized_entropy(guess, truth)
        result[f"auc/{task}"] = area_under_curve(guess, truth)
        result[f"gauc/{task}"] = group_area_under_curve(guess, truth, users)
    return {"model": result}
