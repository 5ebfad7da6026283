"""Whether DLRMv4 learns the preferences that generated data has: the AUC of the last window of
time, against the AUC of the probabilities that the data was drawn with (the oracle's), and against
the public modules, trained on the same batches in the same order.

Users and items are few, and users have 4,500 events on average, as Yambda's: each pair of a user
and an artist occurs often enough to be learned. Every sample is trained once.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.config import RunConfig
from freescale.data.batches.loader import Histories
from freescale.data.features.store import FeatureStore
from freescale.train.build import load_histories
from freescale.train.evaluate import area_under_curve
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport
from freescale_bench.common.results import Destination, Row, Target, make_claims, write
from freescale_bench.dlrm.generate import YambdaReport, compute_chances, generate_yambda
from freescale_bench.dlrm.shapes import TASK, Shape

AUC = f"auc/{TASK}"
TARGETS = (
    Target("share", "AUC beyond 0.5, of the oracle's on the same samples", 90, "%"),
    Target(
        "apart", "difference of the public modules' AUC from FreeScale's", 0.003, "",
        at_least=False,
    ),
)  # fmt: skip
# of the public modules: not settings of theirs, or the same in plain torch (`parity`)
_FIXED = {"positions": 8192, "head_hidden": 512, "dropout": 0.0, "input_dropout": 0.0}


@dataclass(frozen=True)
class Plan:
    """Data, and settings of the run in addition to the recipe's."""

    data: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def make_settings(self, report: YambdaReport) -> dict[str, Any]:
        return {
            **_FIXED,
            "recipe": "dlrm-v4",
            "features": _list_features(report),
            "num_items": report.items + 1,
            "device": "cpu",
            "warmup": 0,
            "checkpoint_every": 10**6,
            "profile_steps": 0,
            "time_buckets": self.settings["width"] - 1,
            **self.settings,
        }


FULL = Plan(
    {"users": 50, "items": 150, "median": 4000, "sigma": 0.5, "cap": 12_000},
    {
        "width": 32, "heads": 2, "layers": 1, "input_hidden": 32, "max_length": 24,
        "min_history": 24, "window": "2000000", "global_batch": 256, "lr": 3e-3, "row_lr": 1e-1,
    },
)  # fmt: skip
TRIAL = Plan(
    {"users": 20, "items": 60, "median": 60, "cap": 200},
    {
        "width": 8, "heads": 2, "layers": 1, "input_hidden": 8, "max_length": 12, "min_history": 6,
        "window": "6000000", "global_batch": 32, "lr": 1e-2, "row_lr": 1e-1,
    },
)  # fmt: skip


def bench_learning(public: Path | None, trial: bool, to: Destination) -> None:
    plan = TRIAL if trial else FULL
    with tempfile.TemporaryDirectory() as temporary:
        rows = measure(plan, Path(temporary), public)
    by_arm = {row["arm"]: row["auc"] for row in rows}
    mine, best = by_arm["freescale"], by_arm["oracle"]
    figures = {"share": 100 * (mine - 0.5) / (best - 0.5)}
    if public is not None:
        figures["apart"] = abs(mine - by_arm["public"])
    if trial:
        return
    command = "freescale bench dlrm learning" + (" --public FOLDER" if public else "")
    claims = make_claims(TARGETS, figures)
    more: dict[str, Any] = {"data": plan.data, "settings": plan.settings}
    write("dlrm-learning", "cpu", command, rows, claims, to=to, **more)


def measure(plan: Plan, folder: Path, public: Path | None) -> list[Row]:
    report = generate_yambda(folder / "data", **plan.data)
    given = {"data": str(folder / "data"), "cache": str(folder / "cache")}
    config = RunConfig.from_settings(given | plan.make_settings(report))
    begin = time.perf_counter()
    trainer = Trainer(config, folder / "run")
    result = trainer.train()
    row: Row = {
        "arm": "freescale",
        "auc": result["test"]["model"][AUC],
        "seconds": time.perf_counter() - begin,
        "trained_samples": trainer.data.num_samples,
        "auc_by_window": _read_windows(folder / "run"),
    }
    rows = [_show(row)]
    data, test = (_load(trainer, part) for part in ("train", "test"))
    labels, chances = _find_truth(report, test)
    auc = area_under_curve(chances, labels)
    rows.append(_show({"arm": "oracle", "auc": auc, "tested_samples": len(labels)}))
    if public is not None:
        from freescale_bench.dlrm.learning_public import train_public

        begin = time.perf_counter()
        guesses = train_public(make_shape(config, data), config, public, data, test)
        row = {"arm": "public", "auc": area_under_curve(guesses, labels)}
        rows.append(_show(row | {"seconds": time.perf_counter() - begin}))
    return rows


def make_shape(config: RunConfig, data: Histories) -> Shape:
    """The sizes of a run, for the public model."""
    model, features = config.model, data.features
    assert isinstance(features, FeatureStore) and model.input_hidden is not None
    # row 0 of a source's table, which is of no feature, is its first feature's here
    (artist, album), (user, *crosses) = (
        [fitted.rows for fitted in each] for each in (features.item, features.context)
    )
    return Shape(
        "learning",
        model.width,
        model.heads,
        model.layers,
        config.data.max_length,
        hidden=model.input_hidden,
        rows=(data.num_items, 1 + artist, album),
        context=(1 + user, *crosses),
    )


def _list_features(report: YambdaReport) -> str:
    """The recipe's, with tables as large as there are combinations, 50,000 rows at most."""
    users, items, artists, albums = report.users, report.items, report.artists, report.albums
    crosses = {
        "user*artist": users * artists,
        "user*album": users * albums,
        "user*hour": users * 24,
        "item*hour": items * 24,
        "artist*hour": artists * 24,
        "user*is_organic": users * 2,
        "user*artist*hour": users * artists * 24,
    }
    words = ["artist=id", "album=id", f"user=id:{users + 2}"]
    words += [f"{name}=cross:{min(2 * rows, 50_000)}" for name, rows in crosses.items()]
    return ",".join(words)


def _load(trainer: Trainer, part: str) -> Histories:
    return load_histories(trainer.config, trainer.histories, LocalTransport("cpu"), part)


def _find_truth(report: YambdaReport, test: Histories) -> tuple[Tensor, Tensor]:
    """Labels of the test samples, and the probabilities that they were drawn with."""
    labels, chances = [], []
    for batch in test:
        labels.append(batch.sequences["labels"].values[:, 0])
        chances.append(_find_chances(report, batch))
    return torch.cat(labels), torch.cat(chances)


def _find_chances(report: YambdaReport, batch: SequenceBatch) -> Tensor:
    # the first feature of the context, after a row for no feature and one for other users
    users = batch.values("context_features")[:, 0] - 2
    found = compute_chances(report, users.numpy(), batch.values("candidates").numpy())
    return torch.from_numpy(found)


def _read_windows(folder: Path) -> list[float]:
    """The AUC of each window that was trained after it was evaluated."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["validation"]["model"][AUC] for line in lines if "validation" in line]


def _show(row: Row) -> Row:
    print(row, flush=True)
    return row
