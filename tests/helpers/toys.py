"""Small models and batches for tests: real code paths, sizes that a test can afford."""

from __future__ import annotations

import torch
from torch import nn

from freescale.batch import Jagged, SequenceBatch


class Clicks(nn.Module):
    """Two tables, one of them read by two features; a nonlinear dense part; float64."""

    def __init__(
        self, items: int = 200, actions: int = 5, width: int = 8, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.item = nn.Embedding(items, width, dtype=dtype, device="meta")
        self.action = nn.Embedding(actions, width, dtype=dtype, device="meta")
        self.layers = nn.Sequential(
            nn.Linear(width, 16, dtype=dtype), nn.Tanh(), nn.Linear(16, 2, dtype=dtype)
        )

    ids = {"item": ["history", "extra"], "action": ["actions"]}

    def forward(self, batch: SequenceBatch) -> dict[str, torch.Tensor]:
        tokens = self.item(batch.values("history")) + self.action(batch.values("actions"))
        lengths = batch.sequences["history"].lengths
        sample = torch.repeat_interleave(torch.arange(len(batch)), lengths)
        pooled = torch.zeros(len(batch), tokens.shape[1], dtype=tokens.dtype).index_add(
            0, sample, torch.tanh(tokens)
        )
        pooled = pooled + self.item(batch.dense["extra"]).sum(1)
        logits = self.layers(pooled)
        labels = batch.dense["labels"].to(logits.dtype)
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, labels, reduction="none"
        ).sum(0)
        return {"click": losses[0], "like": losses[1]}


def clicks_batch(samples: int, seed: int, items: int = 200, longest: int = 12) -> SequenceBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (samples,), generator=generator)
    tokens = int(lengths.sum())
    return SequenceBatch(
        sequences={
            "history": Jagged(torch.randint(0, items, (tokens,), generator=generator), lengths),
            "actions": Jagged(torch.randint(0, 5, (tokens,), generator=generator), lengths),
        },
        dense={
            "extra": torch.randint(0, items, (samples, 3), generator=generator),
            "labels": torch.randint(0, 2, (samples, 2), generator=generator).float(),
        },
        weights={"click": torch.ones(samples), "like": torch.ones(samples)},
        keys=torch.arange(samples),
        number=seed,
    )


def rank_slice(batch: SequenceBatch, rank: int, world: int) -> SequenceBatch:
    return batch.slice(len(batch) * rank // world, len(batch) * (rank + 1) // world)
