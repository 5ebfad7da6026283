"""A model of your own on several ranks: plain nn.Module in, sharded tables out.

torchrun --nproc-per-node 2 examples/own_model.py        # or: python examples/own_model.py
"""

from collections.abc import Iterator

import torch
from torch import nn

import freescale
from freescale import Jagged, SequenceBatch


class ClickModel(nn.Module):
    """Knows nothing of ranks. Returns sums; the pipeline divides by the weight of the global
    batch."""

    def __init__(self) -> None:
        super().__init__()
        # on the meta device it needs no memory: parallelize draws the rows, on all ranks
        self.item = nn.Embedding(100_000, 32, device="meta")
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: SequenceBatch) -> dict[str, torch.Tensor]:
        history = batch.sequences["history"]
        rows = self.item(history.values)  # [tokens, 32]
        sample = torch.arange(len(batch), device=rows.device).repeat_interleave(history.lengths)
        pooled = rows.new_zeros(len(batch), 32).index_add(0, sample, rows)
        logits = self.layers(pooled).squeeze(1)
        return {
            "click": nn.functional.binary_cross_entropy_with_logits(
                logits, batch.dense["clicked"], reduction="sum"
            )
        }


def batches(rank: int, steps: int, samples: int = 64) -> Iterator[SequenceBatch]:
    """This rank's data: any iterable of SequenceBatch. Ranks may have different numbers of
    batches."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        lengths = torch.randint(1, 50, (samples,), generator=generator)
        ids = torch.randint(0, 100_000, (int(lengths.sum()),), generator=generator)
        clicked = (torch.arange(samples) % 2).float()
        yield SequenceBatch(
            sequences={"history": Jagged(ids, lengths)},
            dense={"clicked": clicked},
            weights={"click": torch.ones(samples)},
        )


def main() -> None:
    torch.manual_seed(0)
    transport = freescale.connect()  # a GPU for each rank if there are any, else the CPU
    sharded = freescale.parallelize(
        ClickModel(),
        ids={"item": ["history"]},
        row_optimizer=freescale.RowWiseAdagrad(lr=0.05),
        transport=transport,
        init_std=0.1,
    )
    optimizer = torch.optim.AdamW(sharded.dense_parameters(), lr=1e-3)
    pipeline = freescale.Pipeline(sharded, optimizer, schedule="staged")
    for step in pipeline.run(batches(transport.rank, steps=20)):
        if transport.rank == 0 and step.step % 5 == 0:
            print(f"step {step.step}  loss {step.loss:.4f}")
    if transport.rank == 0:
        print(sharded)
    transport.close()


if __name__ == "__main__":
    main()
