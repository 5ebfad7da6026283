"""Trains seeds with and without features, and compares the ranks of the same users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale_bench.common.jobs import run_jobs
from freescale_bench.common.ranks import get_gpu_name
from freescale_bench.common.results import Claim, Destination, at_least, write
from freescale_bench.quality.bench import parse_setting
from freescale_bench.quality.intervals import (
    METRICS,
    bootstrap_relative,
    measure_users,
    summarize,
)
from freescale_bench.quality.seed import RANKS, Seed, list_jobs

PLAIN, WITH = "without features", "with features"
COLD = "hr@10/cold"
_RARE = 0.005  # HR@10 of cold items, below which a difference counts and not a ratio


@dataclass(frozen=True)
class Plan:
    """The options of the command."""

    data: str
    items: str
    users: str | None
    name: str
    recipe: str | None
    changes: Sequence[str]
    seeds: int
    jobs: int
    device: str
    run_folder: Path
    has_targets: bool = True

    def list_seeds(self) -> dict[str, list[Seed]]:
        given: dict[str, Any] = dict(parse_setting(change) for change in self.changes)
        given |= {"data": self.data, "recipe": self.recipe, "device": self.device}
        folder = self.run_folder / f"{self.recipe or 'defaults'}-{self.name}"
        given |= {"cache": str(folder / "cache")}
        files = {"items": self.items, "users": self.users}
        arms: dict[str, dict[str, Any]] = {PLAIN: {"features": "none"}, WITH: files}
        return {
            arm: [
                Seed(given | more | {"seed": n}, str(folder / arm.replace(" ", "-") / str(n)))
                for n in range(self.seeds)
            ]
            for arm, more in arms.items()
        }

    def describe_command(self) -> str:
        """Formats the command without paths."""
        words = [f"--data {Path(self.data).name}", f"--items {Path(self.items).name}"]
        words += [f"--users {Path(self.users).name}"] if self.users else []
        words += [f"--recipe {self.recipe}"] if self.recipe else []
        words += [f"--set {change}" for change in self.changes]
        words += [] if self.has_targets else ["--no-targets"]
        return f"freescale bench features quality {' '.join(words)} --seeds {self.seeds}"


def bench_quality(plan: Plan, to: Destination) -> None:
    arms = plan.list_seeds()
    run_jobs([job for arm, seeds in arms.items() for job in list_jobs(arm, seeds)], plan.jobs)
    ranks = {arm: [_read_ranks(seed) for seed in seeds] for arm, seeds in arms.items()}
    rows = []
    for arm, seeds in arms.items():
        results = [seed.find_result() for seed in seeds]
        quality = [result["quality"]["model"] for result in results if result is not None]
        names = [*METRICS, *(f"{metric}/unseen" for metric in METRICS), COLD]
        row: dict[str, Any] = {"arm": arm, "users": len(ranks[arm][0])}
        row |= {name: summarize([values.get(name, 0.0) for values in quality]) for name in names}
        row["cold"] = quality[0]["cold"]
        row["seconds"] = [result["seconds"] for result in results if result is not None]
        rows.append(row)
    users = {arm: _average(of) for arm, of in ranks.items()}
    comparison = {m: bootstrap_relative(users[WITH][m], users[PLAIN][m]) for m in METRICS}
    cold = [row[COLD]["mean"] for row in rows]
    claims = make_claims(plan.name, comparison, *cold) if plan.has_targets else []
    config = arms[WITH][0].config
    write(
        f"features-{plan.name}",
        get_gpu_name() if plan.device == "cuda" else "cpu",
        plan.describe_command(),
        rows,
        claims,
        to=to,
        comparison=comparison,
        method=(
            "leave one out, full catalogue, history's items included; mean over seeds with "
            "Student's 95 % interval; bootstrap over users of the means over seeds"
        ),
        epochs=config.train.epochs,
    )


def make_claims(
    name: str, comparison: dict[str, dict[str, float]], plain: float, featured: float
) -> list[Claim]:
    low = comparison[METRICS[1]]["low"]
    claims = [at_least(f"{name}: {METRICS[1]}, lower end of the 95 % interval", 0.0, low, "%")]
    if plain < _RARE:
        text = f"{name}: HR@10 of cold items, more than the {plain:.4f} without features"
        return [*claims, at_least(text, 0.01, featured - plain, "")]
    text = f"{name}: HR@10 of cold items, over that without features"
    return [*claims, at_least(text, 2.0, featured / plain, "times")]


def _read_ranks(seed: Seed) -> NDArray[np.int64]:
    """[users]: the rank of each user's target among all items."""
    path = Path(seed.folder) / RANKS
    return np.loadtxt(path, delimiter=",", skiprows=1, usecols=2, dtype=np.int64)


def _average(runs: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[np.float64]]:
    """By metric: the mean over runs of each user's contribution, [users]."""
    measured = [measure_users(ranks) for ranks in runs]
    return {metric: np.mean([one[metric] for one in measured], axis=0) for metric in METRICS}
