"""What semi-local attention does to quality: the same seeds, with and without --attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freescale_bench.common.jobs import run_jobs
from freescale_bench.common.ranks import get_gpu_name
from freescale_bench.common.results import Claim, Destination, Row, at_least, write
from freescale_bench.quality.bench import (
    KINDS,
    Plan,
    average_users,
    make_row,
    measure_seed,
    read_own_ranks,
)
from freescale_bench.quality.intervals import METRICS, bootstrap_relative
from freescale_bench.quality.seed import RANKS, list_jobs

WORST = -3.0  # percent: lowest difference from full attention that is accepted


@dataclass(frozen=True)
class Setting:
    """The options of the command."""

    data: Sequence[str]
    attend: str
    changes: Sequence[str]
    seeds: int
    jobs: int
    device: str
    folder: Path

    def plan(self, data: str, arm: str) -> Plan:
        changes = [*self.changes, *([f"attend={self.attend}"] if arm == "semi-local" else [])]
        return Plan(
            data, Path(data).stem, None, changes, self.seeds, self.jobs, self.device,
            self.folder / f"{Path(data).stem}-{arm}",
        )  # fmt: skip


def bench_quality(setting: Setting, to: Destination) -> None:
    rows: list[Row] = []
    claims: list[Claim] = []
    comparisons: dict[str, Any] = {}
    datasets = []
    for data in setting.data:
        plans = {arm: setting.plan(data, arm) for arm in ("full", "semi-local")}
        name = plans["full"].name
        own = {arm: _train(arm, plan) for arm, plan in plans.items()}
        for arm, ranks in own.items():
            row = make_row(arm, [measure_seed(one) for one in ranks], len(ranks[0]))
            rows.append({"data": name, **row})
        users = own["full"][0][:, 0].tolist()
        found: dict[str, dict[str, float]] = {}
        for column, kind in enumerate(KINDS, start=1):
            full, seen = (average_users(own[arm], users, column) for arm in ("full", "semi-local"))
            found |= {m + kind: bootstrap_relative(seen[m], full[m]) for m in METRICS}
        comparisons[name] = found
        claims += [
            at_least(f"{name}: {metric} of semi-local, against full attention", WORST, one, "%")
            for metric, one in ((metric, found[metric]["percent"]) for metric in METRICS)
        ]
        datasets.append(plans["full"].describe_data())
    words = [f"--quality {Path(data).name}" for data in setting.data]
    words += [f"--attend {setting.attend}", *(f"--set {change}" for change in setting.changes)]
    write(
        "attention-quality", get_gpu_name() if setting.device == "cuda" else "cpu",
        f"freescale bench attention {' '.join(words)} --seeds {setting.seeds}", rows, claims, to=to,
        datasets=datasets, comparison=comparisons,
        method=(
            "leave one out, full catalogue; '/unseen': without the items of the input history; "
            "the same seeds with and without --attend; bootstrap over users of the means over seeds"
        ),
    )  # fmt: skip


def _train(arm: str, plan: Plan) -> list[Any]:
    seeds = plan.list_seeds()
    cache = str(plan.folder.parent / "cache")  # the arms read the same events
    seeds = [replace(seed, settings=seed.settings | {"cache": cache}) for seed in seeds]
    run_jobs(list_jobs(f"{plan.name} {arm}", seeds), plan.jobs)
    return [read_own_ranks(Path(seed.folder) / RANKS) for seed in seeds]
