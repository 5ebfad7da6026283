"""`freescale bench quality`: trains seeds of a recipe and of the peer, and compares their
quality."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.config import RunConfig
from freescale.config.metrics import UNSEEN
from freescale.config.options import read_number
from freescale.config.recipe import find_settings
from freescale.data.batches.splits import LEAST_EVENTS
from freescale_bench.common.jobs import run_jobs
from freescale_bench.common.ranks import get_gpu_name
from freescale_bench.common.results import Claim, Destination, Row, at_least, write
from freescale_bench.quality.intervals import (
    METRICS,
    bootstrap_relative,
    compare_means,
    measure_users,
    summarize,
)
from freescale_bench.quality.peer import (
    PeerRun,
    find_config,
    make_jobs,
    read_figures,
    read_run,
    write_interactions,
)
from freescale_bench.quality.seed import RANKS, Seed, list_jobs

# events before the target; users with fewer have nothing to train on
LEAST_HISTORY = LEAST_EVENTS["leave-one-out"] - 1
WORST = -3.0  # percent: lowest difference from the peer that is accepted
PEER = "public HSTU"
KINDS = ("", UNSEEN)
_READERS: dict[str, Any] = {"int": int, "float": float, "str": str, "int | str": read_number}


@dataclass(frozen=True)
class Plan:
    """The options of the command."""

    data: str
    name: str
    recipe: str | None = None
    changes: Sequence[str] = ()
    seeds: int = 5
    jobs: int = 1
    device: str = "auto"
    run_folder: Path | None = None
    catalogue: str = "unseen"
    peer: Path | None = None
    peer_config: str | None = None
    peer_figures: Path | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.jobs < 1:
            raise ValueError(
                f"--seeds and --jobs must be at least 1, not {self.seeds}, {self.jobs}"
            )
        if self.peer is not None and self.peer_figures is not None:
            raise ValueError("give either --peer, which trains the peer, or --peer-figures")

    @property
    def arm(self) -> str:
        return Path(self.recipe).stem if self.recipe else "defaults"

    @property
    def folder(self) -> Path:
        return self.run_folder or Path("runs") / "quality" / f"{self.arm}-{self.name}"

    def list_seeds(self) -> list[Seed]:
        given: dict[str, Any] = dict(parse_setting(change) for change in self.changes)
        given |= {"data": self.data, "recipe": self.recipe, "device": self.device}
        given |= {"cache": str(self.folder / "cache")}
        return [
            Seed(given | {"seed": seed}, str(self.folder / f"seed-{seed}"))
            for seed in range(self.seeds)
        ]

    def describe_command(self) -> str:
        """Formats the command without paths."""
        words = ["freescale bench quality", f"--data {Path(self.data).name}"]
        words += [f"--recipe {Path(self.recipe).name}"] if self.recipe else []
        words += [f"--set {change}" for change in self.changes] + [f"--seeds {self.seeds}"]
        words += ["--catalogue all"] if self.catalogue == "all" else []
        words += ["--peer FOLDER"] if self.peer else []
        words += ["--peer-figures FILE"] if self.peer_figures else []
        return " ".join(words)

    def describe_data(self) -> dict[str, str]:
        path, digest = Path(self.data), {}
        if path.is_file():
            digest = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        return {"name": self.name, "file": path.name, **digest}


def parse_setting(text: str) -> tuple[str, Any]:
    """Parses `epochs=25` into ("epochs", 25). ValueError if there is no such option of `freescale
    train`, or the value has another type."""
    name, equals, value = text.partition("=")
    entry = find_settings().get(name.strip().replace("-", "_"))
    if not equals or entry is None:
        raise ValueError(f"{text!r} is not NAME=VALUE with an option of `freescale train`")
    kind = str(entry.type).removesuffix(" | None")
    try:
        if kind == "bool":
            return entry.name, {"true": True, "false": False}[value.strip().lower()]
        return entry.name, _READERS[kind](value.strip())
    except (KeyError, ValueError):
        raise ValueError(f"{text!r}: {entry.name} must be of type {kind}") from None


def bench_quality(plan: Plan, to: Destination) -> None:
    from freescale.train.build import prepare_data

    seeds = plan.list_seeds()
    config = seeds[0].config  # raises on wrong settings
    if config.model.task != "retrieval" or config.data.split == "none":
        raise ValueError("quality needs retrieval with a test part: --task, --split")
    histories = prepare_data(config)
    peers = _train_all(plan, seeds, config, histories)
    found = [seed.find_result() for seed in seeds]
    results = [result for result in found if result is not None]
    own = [read_own_ranks(Path(seed.folder) / RANKS) for seed in seeds]
    rows = [make_row(plan.arm, [measure_seed(one) for one in own], len(own[0]))]
    rows[0]["seconds"] = [result["seconds"] for result in results]
    rows[0]["steps"] = [result["step"] for result in results]
    popularity = results[0]["quality"]["popularity"]
    rows.append(make_row("popularity", [{name: popularity[name] for name in _list_names()}], None))
    comparison: dict[str, Any] = {}
    if peers:
        rows.append(make_row(PEER, [run.figures for run in peers], peers[0].users))
        comparison = compare(own, rows[0], peers, "" if plan.catalogue == "all" else UNSEEN)
    label = "" if plan.recipe is None else f"{plan.arm}-{plan.name}-"
    write(
        "quality",
        f"{label}{get_gpu_name() if results[0]['device'] == 'cuda' else 'cpu'}",
        plan.describe_command(),
        rows,
        make_claims(plan, rows, comparison),
        to=to,
        dataset=plan.describe_data(),
        training={"settings": plan.arm, **results[0]["config"]},
        comparison=comparison,
        method=(
            "leave one out, full catalogue; '/unseen': without the items of the input history; "
            f"users with at least {LEAST_HISTORY + 1} events (popularity: all users); mean over "
            "seeds with Student's 95 % interval; bootstrap over users of the means over seeds"
        ),
    )


def _train_all(
    plan: Plan, seeds: Sequence[Seed], config: RunConfig, histories: Path
) -> list[PeerRun]:
    """Trains the missing runs. Returns the peer's runs."""
    jobs = list_jobs(plan.arm, seeds)
    if plan.peer is not None:
        data = plan.folder / "interactions.parquet"
        if not data.exists():
            write_interactions(histories, data)
        jobs += make_jobs(
            plan.peer / "run_gr.py",
            find_config(plan.recipe, plan.peer_config),
            data,
            plan.folder,
            range(plan.seeds),
            config.train.epochs,
            _choose_device(plan.device),
        )
    run_jobs(jobs, plan.jobs)
    if plan.peer is not None:
        runs = [read_run(plan.folder / f"peer-{seed}") for seed in range(plan.seeds)]
        return [run for run in runs if run is not None]
    return [] if plan.peer_figures is None else read_figures(plan.peer_figures)


def _choose_device(device: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def read_own_ranks(path: Path) -> NDArray[np.int64]:
    """Reads [users, 3]: user_id, rank, rank among unseen items; only users with something to train
    on."""
    table = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.int64, ndmin=2)
    return table[table[:, 1] >= LEAST_HISTORY][:, [0, 2, 3]]


def _list_names() -> list[str]:
    return [metric + kind for kind in KINDS for metric in METRICS]


def measure_seed(ranks: NDArray[np.int64]) -> dict[str, float]:
    return {
        metric + kind: float(values.mean())
        for column, kind in enumerate(KINDS, start=1)
        for metric, values in measure_users(ranks[:, column]).items()
    }


def make_row(arm: str, figures: Sequence[Mapping[str, float]], users: int | None) -> Row:
    summaries = {name: summarize([of[name] for of in figures]) for name in _list_names()}
    return {"arm": arm, "seeds": len(figures), "users": users, **summaries}


def compare(
    own: Sequence[NDArray[np.int64]], row: Row, peers: Sequence[PeerRun], kind: str
) -> dict[str, Any]:
    """Returns relative differences from the peer. If both have ranks by user, over the users in
    common, with a bootstrap over them; else of the means."""
    ranks = [run.ranks for run in peers if run.ranks is not None]
    found: dict[str, Any] = {}
    if len(ranks) < len(peers):
        for metric in METRICS:
            name = metric + kind
            means = [run.figures[name] for run in peers]
            found[name] = {"percent": compare_means(row[name]["values"], means)}
        return found
    common = sorted(set.intersection(*(set(one[:, 0].tolist()) for one in [*own, *ranks])))
    column = 1 + KINDS.index(kind)
    ours, theirs = (average_users(of, common, column) for of in (own, ranks))
    return {m + kind: bootstrap_relative(ours[m], theirs[m]) for m in METRICS}


def average_users(
    runs: Sequence[NDArray[np.int64]], users: Sequence[int], column: int
) -> dict[str, NDArray[np.float64]]:
    """By metric: the mean over runs of each user's contribution, [users]."""
    measured = []
    for run in runs:
        ordered = run[np.argsort(run[:, 0])]
        measured.append(measure_users(ordered[np.searchsorted(ordered[:, 0], users), column]))
    return {metric: np.mean([one[metric] for one in measured], axis=0) for metric in METRICS}


def make_claims(plan: Plan, rows: Sequence[Row], comparison: Mapping[str, Any]) -> list[Claim]:
    about = f"{plan.arm} on {plan.name}"
    if comparison:
        differences = {name: one["percent"] for name, one in comparison.items()}
        each = [
            at_least(f"{about}: {name} against the {PEER}", WORST, value, "%")
            for name, value in differences.items()
        ]
        mean = sum(differences.values()) / len(differences)
        both = f"{about}: {' and '.join(differences)} against the {PEER}, mean"
        return [*each, at_least(both, 0.0, mean, "%")]
    kind = "" if plan.catalogue == "all" or plan.recipe is None else UNSEEN
    name = METRICS[0] + kind
    ratio = rows[0][name]["mean"] / rows[1][name]["mean"]
    text = f"{about}: {name} over the full catalogue, times that of the popularity baseline"
    return [at_least(text, 1.5, ratio, "x")]
