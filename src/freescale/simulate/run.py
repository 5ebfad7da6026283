"""`freescale simulate`: configurations side by side, and what each technique and each part of the
machine would give."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from freescale.config import SimulateConfig
from freescale.data.prepare import prepare
from freescale.embedding.placement import Placement
from freescale.folders import find_cache_folder
from freescale.simulate.compute import Model, load_calibration
from freescale.simulate.costs import Batch
from freescale.simulate.generated_workload import GeneratedWorkload
from freescale.simulate.network import Network, load_network, load_preset
from freescale.simulate.output import collect_run
from freescale.simulate.recorded_workload import RecordedWorkload
from freescale.simulate.simulator import (
    Cluster,
    Setting,
    choose_table_placement,
    plan_batches,
    simulate,
)
from freescale.simulate.workload import Workload


@dataclass(frozen=True)
class Outcome:
    label: str
    setting: Setting
    gpus: int
    figures: dict[str, Any]  # as ledger.json
    seconds: float  # that the simulation took

    @property
    def exposed_ms(self) -> float:
        return float(sum(self.figures["exposed_ms"].values()))

    @property
    def row(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "arm": self.label,
            **asdict(self.setting),
            "step_ms": self.figures["step_ms"]["mean"],
            "straggler_percent": self.figures["straggler_percent"],
            "exposed_percent": self.figures["exposed_percent"],
            "exposed_ms": self.figures["exposed_ms"],
            "samples_per_second": self.figures["samples_per_second"],
            "collision_percent": self.figures["collision_percent"],
            "imbalance": self.figures["imbalance"],
            "seconds": self.seconds,
        }


def build_cluster(config: SimulateConfig, gpus: int) -> Cluster:
    network = load_network(config.network) if config.network else load_preset(config.preset)
    calibration = load_calibration(config.calibration or network.calibration)
    precision = "bf16" if network.device == "cuda" else "fp32"
    model = Model(config.width, config.layers, config.heads, precision, config.cap)
    network.check_ranks(gpus)
    calibration.find_shape(model)
    return Cluster(model, calibration, network, gpus, config.jitter)


def build_workload(config: SimulateConfig, gpus: int) -> Workload:
    samples = config.batch * gpus
    if config.data:
        histories = prepare(
            config.data, Path(config.cache) if config.cache else find_cache_folder()
        )
        return RecordedWorkload(histories, samples, cap=config.cap, seed=config.seed)
    shape = {"median": config.median, "sigma": config.sigma, "cap": config.cap}
    ids = {
        "items": config.items,
        "popularity": config.popularity,
        "collisions": None if config.natural else config.collisions,
    }
    return GeneratedWorkload(samples, **shape, **ids, seed=config.seed)  # type: ignore[arg-type]


def list_arms(config: SimulateConfig) -> list[tuple[str, Setting]]:
    """Each technique alone, and together; or the one configuration that was asked for."""

    def balanced(schedule: str, transport: str) -> Setting:
        adapt = config.adapt and config.balance != "none"
        return Setting(schedule, config.balance, transport, adapt, config.placement)

    plain = Setting(placement=config.placement)
    if config.schedule is not None:
        return [("as asked", balanced(config.schedule, config.transport))]
    return [
        (
            "plain TorchRec: ids not deduplicated",
            Setting("metadata", placement="sharded", deduplicate=False),
        ),
        ("none", plain),
        ("metadata overlap", replace(plain, schedule="metadata")),
        ("balancing", balanced("serial", "collective")),
        ("staged", replace(plain, schedule="staged")),
        ("hostwire", replace(plain, transport="hostwire")),
        ("staged, hostwire", replace(plain, schedule="staged", transport="hostwire")),
        ("balancing, staged", balanced("staged", "collective")),
        ("all", balanced("staged", "hostwire")),
        ("all, but stale rows", balanced("stale", "hostwire")),
    ]


class Plans:
    """Batches of one source, planned once for each partitioner."""

    def __init__(self, cluster: Cluster, source: Workload, steps: int) -> None:
        self.cluster, self.source, self.steps = cluster, source, steps
        self._planned: dict[str, list[Batch]] = {}

    def choose_placement(self, setting: Setting) -> Placement:
        return choose_table_placement(
            setting, self.cluster.model, self.source.items, self._plan("none")[0]
        )

    def _plan(self, balance: str) -> list[Batch]:
        if balance not in self._planned:
            self._planned[balance] = plan_batches(balance, self.cluster, self.source, self.steps)
        return self._planned[balance]

    def simulate(
        self,
        label: str,
        setting: Setting,
        *,
        network: Network | None = None,
        steps: int | None = None,
        folder: Path | None = None,
    ) -> Outcome:
        """One configuration, on another network or over fewer steps if asked."""
        begin = time.perf_counter()
        cluster = self.cluster if network is None else replace(self.cluster, network=network)
        count = steps or self.steps
        planned = () if setting.adapt else self._plan(setting.balance)[:count]
        figures = collect_run(
            simulate(setting, cluster, self.source, count, planned), cluster.gpus, folder
        )
        return Outcome(label, setting, cluster.gpus, figures, time.perf_counter() - begin)


def improve_network(network: Network) -> dict[str, Network]:
    """The same with twice of one thing."""
    faster = {
        way: replace(getattr(network, way), gb_per_s=2 * getattr(network, way).gb_per_s)
        for way in ("near", "far", "pcie")
    }
    half = {
        way: replace(getattr(network, way), latency_us=getattr(network, way).latency_us / 2)
        for way in faster
    }
    names = {
        "near": "links inside a node twice as fast",
        "far": "network cards twice as fast",
        "pcie": "PCIe twice as fast",
    }
    changed = {names[way]: replace(network, **{way: link}) for way, link in faster.items()}
    return changed | {
        "latency and cost per peer halved": replace(
            network, **half, per_peer_us=network.per_peer_us / 2
        )
    }


def run_simulation(
    config: SimulateConfig,
    gpus: Sequence[int],
    report: Callable[[Outcome], None] = lambda one: None,
) -> dict[str, Any]:
    """Everything that the command prints, as plain data; with --out also as files, a folder for
    each configuration."""
    out = Path(config.out) if config.out else None
    rows: list[dict[str, Any]] = []
    changes: list[dict[str, Any]] = []
    notes: list[str] = []
    for count in gpus:
        cluster, source = build_cluster(config, count), build_workload(config, count)
        plans = Plans(cluster, source, config.steps)
        found: dict[str, Outcome] = {}
        for label, setting in list_arms(config):
            folder = out / f"{count}-{re.sub('[^a-z]+', '-', label.lower())}" if out else None
            found[label] = plans.simulate(label, setting, folder=folder)
            report(found[label])
            rows.append(found[label].row)
        notes += [
            *cluster.calibration.list_notes(cluster.model, source.get_lengths(0)),
            *source.notes,
        ]
        placement = plans.choose_placement(Setting(placement=config.placement))
        notes.append(f"item table on {count} GPUs: {placement.kind} ({placement.reason})")
        notes += [f"network: {cluster.network.name} ({cluster.network.about})"]
        if isinstance(source, RecordedWorkload):
            notes.append(source.describe_error(count))
        changes += _compare_changes(config, plans, found)
    data = {
        "config": asdict(config),
        "notes": list(dict.fromkeys(notes)),
        "rows": rows,
        "changes": changes,
    }
    if out is not None:
        (out / "simulate.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data


def _compare_changes(
    config: SimulateConfig, plans: Plans, found: dict[str, Outcome]
) -> list[dict[str, Any]]:
    """How much shorter a sample's time gets if one part of the machine were better, or the batch
    larger."""
    steps = min(config.steps, 5)
    asked = {label: found[label].setting for label in ("none", "all", "as asked") if label in found}
    made = []
    twice = None
    if not config.data:
        source = build_workload(replace(config, batch=2 * config.batch), plans.cluster.gpus)
        twice = Plans(plans.cluster, source, steps)
    for label, setting in asked.items():
        base = plans.simulate(label, setting, steps=steps)
        for what, network in improve_network(plans.cluster.network).items():
            made.append(
                _compare(
                    label, what, base, plans.simulate(label, setting, network=network, steps=steps)
                )
            )
        if twice is not None:
            made.append(_compare(label, "twice the batch", base, twice.simulate(label, setting)))
    return made


def _compare(label: str, what: str, base: Outcome, changed: Outcome) -> dict[str, Any]:
    gain = 100 * (changed.figures["samples_per_second"] / base.figures["samples_per_second"] - 1)
    return {
        "gpus": base.gpus,
        "arm": label,
        "change": what,
        "more_samples_per_second_percent": gain,
    }
