"""A ranking model with several tables and tasks, with evaluation, on generated tensors.

torchrun --nproc-per-node 2 examples/ranking_model.py    # or: python examples/ranking_model.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import freescale
from freescale import SequenceBatch

USERS, ITEMS, CATEGORIES, TASKS = 1_000, 500, 20, ("click", "buy")


class RankingModel(nn.Module):
    """Three embeddings, of which `parallelize` makes tables, and a tower with one output per task.
    Plain torch: it knows nothing of ranks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, width)  # weights are kept: rank 0's, on all ranks
        self.item = nn.Embedding(ITEMS, width)
        self.category = nn.Embedding(CATEGORIES, width)
        for table in (self.user, self.item, self.category):
            nn.init.normal_(table.weight, std=0.1)
        self.tower = nn.Sequential(nn.Linear(4 * width, 32), nn.ReLU(), nn.Linear(32, len(TASKS)))

    def logits(self, batch: SequenceBatch) -> Tensor:  # [samples, tasks]
        user, item = self.user(batch.dense["user"]), self.item(batch.dense["item"])
        category = self.category(batch.dense["category"])
        logits: Tensor = self.tower(torch.cat([user, item, category, user * item], dim=1))
        return logits

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """The *sum* of each task's losses; `weights` says what the global sum is divided by."""
        losses = nn.functional.binary_cross_entropy_with_logits(
            self.logits(batch), batch.dense["labels"], reduction="none"
        )
        return {task: (losses[:, n] * batch.weights[task]).sum() for n, task in enumerate(TASKS)}


def batches(rank: int, steps: int, seed: int = 0, samples: int = 256) -> Iterator[SequenceBatch]:
    """Some users click more than others, some items are clicked more; the best are bought."""
    hidden = torch.Generator().manual_seed(1)
    interest, appeal = (torch.randn(n, generator=hidden) for n in (USERS, ITEMS))
    generator = torch.Generator().manual_seed(1_000 * seed + rank)
    for _ in range(steps):
        user = torch.randint(0, USERS, (samples,), generator=generator)
        item = torch.randint(0, ITEMS, (samples,), generator=generator)
        score = interest[user] + appeal[item]
        clicked, bought = (score > 0).float(), (score > 1).float()
        yield SequenceBatch(
            dense={
                "user": user,
                "item": item,
                "category": item % CATEGORIES,
                "labels": torch.stack([clicked, bought], dim=1),
            },
            # purchases are supervised where there was a click
            weights={"click": torch.ones(samples), "buy": clicked},
        )


def main() -> None:
    transport = freescale.connect()
    model = RankingModel()
    sharded = freescale.parallelize(
        model,
        ids={"user": ["user"], "item": ["item"], "category": ["category"]},
        row_optimizer=freescale.Adam(lr=1e-2),
        transport=transport,
    )

    def measure(
        batch: SequenceBatch, losses: dict[str, Tensor]
    ) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """A pair (sum, weight) for each loss, a value per sample for the accuracy."""
        right = (model.logits(batch) > 0) == (batch.dense["labels"] > 0.5)
        means = {task: (losses[task], batch.weights[task].sum()) for task in TASKS}
        return {**means, "click accuracy": right[:, 0].float()}

    def show(step: int) -> None:
        found = freescale.evaluate(sharded, batches(transport.rank, steps=4, seed=1), measure)
        if transport.rank == 0:
            values = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
            print(f"step {step}  {values}")

    optimizer = torch.optim.AdamW(sharded.dense_parameters(), lr=3e-3)
    show(0)
    with freescale.Pipeline(sharded, optimizer, task_weights={"buy": 0.5}) as pipeline:
        for result in pipeline.run(batches(transport.rank, steps=60)):
            if result.step % 20 == 0:
                show(result.step)
    if transport.rank == 0:
        print(sharded)
    transport.close()


if __name__ == "__main__":
    main()
