"""Metrics, as pure functions of tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ranking_quality(ranks: Tensor) -> dict[str, float]:
    """HR@k, NDCG@10 and MRR from the rank [n] (1 = best) of each target in the whole catalogue."""
    if not ranks.numel():
        return {}
    ranks = ranks.double()
    quality = {f"hr@{k}": (ranks <= k).double().mean().item() for k in (1, 10, 50)}
    gain = torch.where(ranks <= 10, 1 / torch.log2(ranks + 1), 0.0)
    return quality | {"ndcg@10": gain.mean().item(), "mrr": (1 / ranks).mean().item()}


def normalized_entropy(predictions: Tensor, labels: Tensor) -> float:
    """Cross entropy of the predictions [n] over that of always predicting the mean label; below 1
    is better than that."""
    mean = labels.double().mean().item()
    if not 0 < mean < 1:
        return math.nan
    predictions = predictions.double().clamp(1e-12, 1 - 1e-12)
    labels = labels.double()
    entropy = -(labels * predictions.log() + (1 - labels) * (1 - predictions).log()).mean().item()
    return entropy / -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))


def area_under_curve(predictions: Tensor, labels: Tensor) -> float:
    """AUC by ranks; ties count half. Predictions that are no number have no rank, so with them the
    AUC is none either."""
    positives = labels > 0.5
    count, total = int(positives.sum()), labels.numel()
    if count in (0, total) or predictions.isnan().any():
        return math.nan
    _, inverse, sizes = torch.unique(predictions.double(), return_inverse=True, return_counts=True)
    middle = sizes.cumsum(0).double() - (sizes.double() - 1) / 2  # mean rank of each tied value
    rank_sum: float = middle[inverse][positives].sum().item()
    return (rank_sum - count * (count + 1) / 2) / (count * (total - count))
