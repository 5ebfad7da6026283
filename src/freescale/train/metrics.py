"""Metrics, as pure functions of tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from freescale.config.metrics import CUTOFFS

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
