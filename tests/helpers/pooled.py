"""A model with bags of every kind, its batches, and their training."""

from __future__ import annotations

import torch
from torch import nn

import freescale
from freescale.batch import Jagged, SequenceBatch
from helpers.training import gather_tables

ROWS, FEATURES = 40, 4


class Pooled(nn.Module):
    """Bags of every kind over tables of one width; one table is read by two features."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"num_embeddings": ROWS, "embedding_dim": 8, "dtype": torch.float64}
        self.summed = nn.EmbeddingBag(**shape, mode="sum")
        self.averaged = nn.EmbeddingBag(**shape, mode="mean", include_last_offset=True)
        self.padded = nn.EmbeddingBag(**shape, mode="mean", padding_idx=3)
        self.fixed = nn.EmbeddingBag(**shape, mode="sum", padding_idx=5)
        self.out = nn.Linear(8, 1, dtype=torch.float64)

    ids = {"summed": ["f0", "f1"], "averaged": ["f2"], "padded": ["f3"], "fixed": ["square"]}

    def forward(self, batch: SequenceBatch) -> dict[str, torch.Tensor]:
        f = [batch.sequences[f"f{number}"] for number in range(FEATURES)]
        weights = batch.sequences["f1 weights"].values
        x = self.summed(f[0].values, f[0].offsets[:-1])
        x = x * torch.tanh(self.summed(f[1].values, f[1].offsets[:-1], weights))
        x = x + self.averaged(f[2].values, f[2].offsets)
        x = x + torch.tanh(self.padded(f[3].values, f[3].offsets[:-1]))
        square = batch.dense["square"]
        x = x - self.fixed(square, per_sample_weights=square.to(x.dtype).cos())
        return {"loss": torch.tanh(self.out(x)).sum()}


def make_batch(seed: int, samples: int = 7, empty: bool = False) -> SequenceBatch:
    """Features of lengths of their own, with empty bags; `empty`: features without any id."""
    generator = torch.Generator().manual_seed(seed)
    sequences = {}
    for number in range(FEATURES):
        lengths = torch.randint(0, 1 if empty else 5, (samples,), generator=generator)
        total = int(lengths.sum())
        values = torch.randint(0, ROWS, (total,), generator=generator)
        sequences[f"f{number}"] = Jagged(values, lengths)
        if number == 1:
            weights = torch.rand(total, generator=generator, dtype=torch.float64)
            sequences["f1 weights"] = Jagged(weights, lengths)
    square = torch.randint(0, 8, (samples, 3), generator=generator)
    return SequenceBatch(
        sequences=sequences,
        dense={"square": square},
        weights={"loss": torch.ones(samples)},
        number=seed,
    )


BATCHES = [make_batch(seed) for seed in range(5)] + [make_batch(9, empty=True)]


def train(batches=BATCHES, placement="sharded", rows=None, transport=None, **options):
    torch.manual_seed(0)
    sharded = freescale.parallelize(
        Pooled(),
        Pooled.ids,
        rows or freescale.SGD(lr=0.1),
        placement=placement,
        transport=transport,
    )
    dense = torch.optim.SGD(sharded.dense_parameters(), lr=0.1)
    pipeline = freescale.Pipeline(sharded, dense, **options)
    losses = [result.loss for result in pipeline.run(batches)]
    pipeline.flush()
    tables = gather_tables(sharded)
    return losses, tables | {n: p.detach() for n, p in sharded.module.named_parameters()}
