"""A ranking model on a flat table of impressions: features of items, two labels, evaluation.

torchrun --nproc-per-node 2 examples/ranking_model.py [impressions.csv]    # or: python ...

Without a file it draws one. Yours may have any columns: name them below.
"""

import csv
import random
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import freescale
from freescale import Schema, SequenceBatch

COLUMNS = ("user_id", "item_id", "category", "price", "hour", "day", "click", "paid")
FEATURES = "item.category,item.price=numeric:8,hour=categorical"
LABELS, TASKS = "click,buy=paid>0", ("click", "buy")
TRAIN, TEST = "day<6", "day>=6"


class RankingModel(nn.Module):
    """Embeddings, of which `parallelize` makes tables, and an output per task. Plain torch: it
    knows nothing of ranks."""

    def __init__(self, rows: dict[str, int], width: int = 16) -> None:
        super().__init__()
        self.items = freescale.models.ItemTower(rows["item"], width, rows["item_features"])
        self.user = nn.Embedding(rows["user"], width)
        self.hour = nn.Embedding(rows["hour"], width)
        for table in (self.user, self.hour):
            nn.init.normal_(table.weight, std=0.1)
        self.layers = nn.Sequential(nn.Linear(4 * width, 32), nn.ReLU(), nn.Linear(32, len(TASKS)))

    def logits(self, batch: SequenceBatch) -> Tensor:  # [samples, tasks]
        item, user = self.items(batch), self.user(batch.dense["user"])
        x = torch.cat([item, user, item * user, self.hour(batch.dense["hour"])], dim=1)
        logits: Tensor = self.layers(x)
        return logits

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        """The *sum* of each task's losses; `weights` says what the global sum is divided by."""
        losses = nn.functional.binary_cross_entropy_with_logits(
            self.logits(batch), batch.dense["labels"], reduction="none"
        )
        return {task: (losses[:, n] * batch.weights[task]).sum() for n, task in enumerate(TASKS)}


def write_impressions(path: Path, rows: int = 20_000) -> Path:
    """Some users click more than others, some categories are clicked more; the best are paid
    for."""
    draw = random.Random(0)
    interest, appeal = ([draw.gauss(0, 1) for _ in range(n)] for n in (300, 20))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in range(rows):
            user, item = draw.randrange(300), draw.randrange(200)
            score, price = interest[user] + appeal[item % 20], 1 + item % 7
            click, paid = int(score > 0), price if score > 1 else 0
            day, hour = row * 7 // rows, draw.randrange(24)
            writer.writerow([user, f"i{item}", f"c{item % 20}", price, hour, day, click, paid])
    return path


def main() -> None:
    transport = freescale.connect()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        drawn = len(sys.argv) < 2
        file = write_impressions(Path(folder, "impressions.csv")) if drawn else Path(sys.argv[1])
        schema = Schema.infer(file, FEATURES, where=TRAIN).fit(file, where=TRAIN)
        train(file, schema, transport, folder if drawn else None)
    transport.close()


def train(
    file: Path, schema: Schema, transport: freescale.Transport, cache: str | None = None
) -> None:
    def read(where: str, epochs: int = 1) -> freescale.data.FlatTable:
        return freescale.data.FlatTable(
            file, schema, 512, where=where, labels=LABELS, weights={"buy": "click"}, cache=cache,
            rank=transport.rank, world=transport.world,
            read=freescale.data.ReadSpec(epochs=epochs),
        )  # fmt: skip

    model = RankingModel(schema.rows)
    sharded = freescale.parallelize(
        model,
        ids={name: [name] for name in ("item", "item_features", "user", "hour")},
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
        found = freescale.evaluate(sharded, read(TEST), measure)
        if transport.rank == 0:
            values = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
            print(f"step {step}  {values}")

    optimizer = torch.optim.AdamW(sharded.dense_parameters(), lr=3e-3)
    show(0)
    with freescale.Pipeline(sharded, optimizer, task_weights={"buy": 0.5}) as pipeline:
        for result in pipeline.run(read(TRAIN, epochs=2)):
            if result.step % 20 == 0:
                show(result.step)
    if transport.rank == 0:
        print(sharded)


if __name__ == "__main__":
    main()
