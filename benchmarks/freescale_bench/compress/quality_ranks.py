"""What each rank of a quality run does: trains arms and evaluates them, one after another. Started
by quality.py under torchrun, with a file that lists [histories, data set, arm, seed, out, changes].

The model is HSTU for retrieval with a wide layer behind it, cut in the middle of that layer, where
activations are exchanged. What that leaves out depends on the sample alone, not on who computes the
upper part, so that here every rank computes both parts.

Every arm of a data set is trained alike: the learning rate falls to zero, the validation part is
looked at after every epoch, and the weights of its best epoch are evaluated on the test part, once.
Rates and dropout were chosen on the validation part, with a seed that is none of the benchmark's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import freescale
from freescale.batch import SequenceBatch
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.data.batches.prefetch import prefetch
from freescale.embedding.sharded_model import ShardedModel
from freescale.ledger.merge import merge_step
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.models.segments import Memory
from freescale.train.build import build_learning_rate, evaluate_part, load_histories
from freescale.transport.api import Transport
from freescale.transport.local import LocalTransport

EXACT, GRADIENTS, ACTIVATIONS = "exact", "gradients, eta 0.99", "activations, 0.95"
ARMS = (EXACT, GRADIENTS, ACTIVATIONS)
WIDE, KEEP = 200, 10  # entries of an activation, and how many of them are kept
SIZES: dict[str, Any] = {"max_length": 20, "negatives": 32}
SHAPE: dict[str, Any] = {"width": 32, "layers": 1, "heads": 2}
TRAINING: dict[str, dict[str, Any]] = {  # by data set; `lr` is that of the dense parameters
    "online_retail_ii": {
        "epochs": 8,
        "global_batch": 64,
        "lr": 1e-2,
        "row_lr": 1e-1,
        "decay": "linear",
    },
    "generated": {"epochs": 14, "global_batch": 64, "lr": 1e-2, "row_lr": 3e-2, "decay": "linear"},
}
# steps between two resets of the thresholds: one that has grown old sends less than its share
EVERY = 1
DROPOUT = {"online_retail_ii": 0.3, "generated": 0.1}
_COUNTERS = ("dense_entries", "dense_entries_sent", "dense_entries_on_wire")


class Cut(Retrieval):
    """A lower part, what crosses to the upper part, and the upper part."""

    def __init__(self, encoder: HSTU, keep: int, **options: Any) -> None:
        super().__init__(encoder, **options)
        self.lower, self.upper = nn.Linear(encoder.width, WIDE), nn.Linear(WIDE, encoder.width)
        self.exchange = freescale.ThresholdedExchange(LocalTransport(), keep)

    def encode_history(self, batch: SequenceBatch, memory: Memory | None = None) -> Tensor:
        events = super().encode_history(batch, memory)  # [tokens, width]
        upper: Tensor = self.upper(self.exchange(torch.relu(self.lower(events))))
        return events + upper


class Best:
    """The weights of the best epoch so far, by the validation part."""

    def __init__(self, parallel: ShardedModel) -> None:
        tables = parallel.tables
        self._weights = [
            *parallel.dense_parameters(),
            *(tables.get_local_state(name)["rows"] for name in tables.specs),
        ]
        self._kept: list[Tensor] = []
        self.epoch, self.hit_rates = 0, list[float]()

    def note(self, hit_rate: float) -> None:
        """After an epoch."""
        if hit_rate > max(self.hit_rates, default=-1.0):
            self.epoch, self._kept = (
                len(self.hit_rates) + 1,
                [w.detach().clone() for w in self._weights],
            )
        self.hit_rates.append(hit_rate)

    @torch.no_grad()
    def restore(self) -> None:
        for weight, kept in zip(self._weights, self._kept, strict=True):
            weight.copy_(kept)


def train(
    transport: Transport, data: Path, name: str, arm: str, seed: int, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The same on every rank. `changes`: of the data set's settings; `tested` false: the test part
    is not looked at."""
    begin = time.perf_counter()
    changes = dict(changes)
    tested, dropout = changes.pop("tested", True), changes.pop("dropout", DROPOUT[name])
    settings = TrainConfig(seed=seed, **TRAINING[name] | changes)
    config = RunConfig(
        DataConfig(data=str(data), **SIZES), ModelConfig(**SHAPE, dropout=dropout), settings
    )
    source = load_histories(config, data, transport)
    torch.manual_seed(seed)
    unbiased = {"position_bias": False, "time_bias": False}
    encoder = HSTU(
        **SHAPE, **unbiased, max_length=SIZES["max_length"], dropout=config.model.dropout
    )
    keep = KEEP if arm == ACTIVATIONS else WIDE
    model = Cut(
        encoder,
        keep,
        num_items=source.num_items,
        temperature=config.model.temperature,
        table_device="meta",
    )
    rows = freescale.Adam(lr=settings.row_lr, betas=(0.9, 0.999))  # as AdamW's
    parallel = freescale.parallelize(
        model, model.features, rows, transport=transport, init_std=SHAPE["width"] ** -0.5, seed=seed
    )
    optimizer = torch.optim.AdamW(
        parallel.dense_parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    pipeline = freescale.Pipeline(
        parallel,
        optimizer,
        schedule="serial",
        precision="fp32",
        learning_rate=build_learning_rate(settings.warmup, settings.decay, len(source)),
        reducer=freescale.Thresholding(0.99, EVERY) if arm == GRADIENTS else None,
    )
    parallel.tables.place(source.batch(0))
    best = Best(parallel)
    records: list[dict[str, Any]] = []
    with closing(prefetch(source)) as batches:
        for result in pipeline.run(batches):
            records += pipeline.ledger.drain()
            if result.step % source.batches_per_epoch == 0:
                best.note(evaluate_part(config, parallel, data, "validation")["model"]["hr@10"])
    records += pipeline.ledger.drain()
    found: dict[str, Any] = {}
    if tested:
        best.restore()
        quality = evaluate_part(config, parallel, data, "test", baseline=True)
        found = {name: quality["model"][name] for name in ("hr@10", "ndcg@10")} | {
            "popularity_hr@10": quality["popularity"]["hr@10"]
        }
    return found | {
        "lr": settings.lr,
        "validation_hr@10": best.hit_rates,
        "best_epoch": best.epoch,
        "last_loss": result.loss,
        "dense_parameters": sum(p.numel() for p in parallel.dense_parameters()),
        "seconds": round(time.perf_counter() - begin, 1),
        **count_traffic(records),
    }


def count_traffic(records: list[dict[str, Any]]) -> dict[str, float]:
    """What this rank sent of its dense gradients, over all steps."""
    sent = sum(merge_step([record])["bytes"]["dense"] for record in records)
    counted = {
        name: sum(record["counters"].get(name, 0) for record in records) for name in _COUNTERS
    }
    return {
        "steps": len(records),
        "dense_bytes_sent_per_step": round(sent / len(records)),
        **counted,
    }


def main() -> None:
    torch.set_num_threads(1)
    transport = freescale.connect("cpu")
    for histories_file, name, arm, seed, out, changes in json.loads(Path(sys.argv[1]).read_text()):
        found = train(transport, Path(histories_file), name, arm, seed, changes)
        if transport.rank == 0:
            best = max(found["validation_hr@10"])
            print(
                (
                    f"{Path(out).stem}, {arm}: HR@10 of the validation part {best:.4f}, "
                    f"{found['seconds']:.0f} s"
                ),
                flush=True,
            )
            Path(out).write_text(json.dumps(found), encoding="utf-8")
    transport.close()


if __name__ == "__main__":
    main()
