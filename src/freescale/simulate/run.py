"""Runs `freescale simulate`: compares configurations, and predicts the gain of each technique and
of each better part of the machine."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from freescale.config import SimulateConfig
from freescale.embedding.dynamic_rules import Dynamic
from freescale.simulate.inputs import (
    build_cluster,
    build_workload,
    compare_with_run,
    describe_training,
    find_dynamic,
    list_omissions,
    read_trained_run,
)
from freescale.simulate.network import Network
from freescale.simulate.output import collect_run
from freescale.simulate.placed_tables import PlacedTables, list_growth, place_tables
from freescale.simulate.recorded_workload import RecordedWorkload
from freescale.simulate.simulator import Cluster, Setting, plan_batches, simulate
from freescale.simulate.verdict import ALL, BASE, GIVEN, UNBALANCED, write_verdict
from freescale.simulate.workload import Workload


@dataclass(frozen=True)
class Outcome:
    """The figures of one simulated configuration."""

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
        names = (
            *("straggler_percent", "exposed_percent", "exposed_ms", "samples_per_second"),
            *("collision_percent", "imbalance"),
        )
        return {
            "gpus": self.gpus,
            "arm": self.label,
            **asdict(self.setting),
            "step_ms": self.figures["step_ms"]["mean"],
            **{name: self.figures[name] for name in names},
            "seconds": self.seconds,
        }


SERIAL, AS_TRAINED = "serial", "as in the run"


def list_arms(config: SimulateConfig, trained: Setting | None = None) -> list[tuple[str, Setting]]:
    """Lists TorchRec, each technique alone and all together; or the one configuration of
    --schedule, and TorchRec. `trained`: the configuration of a run, which is listed too."""
    plain = Setting(placement=config.placement, cache_miss=config.cache_miss)
    adapt = config.adapt and config.balance != "none"

    def balanced(schedule: str, transport: str) -> Setting:
        setting = replace(plain, schedule=schedule, transport=transport)
        return replace(setting, balance=config.balance, adapt=adapt)

    base = (BASE, Setting("sparse_dist", placement="sharded", deduplicate=False))
    if config.schedule is not None:
        return [(GIVEN, balanced(config.schedule, config.transport)), base]
    arms = [
        base,
        (f"{BASE}, ids deduplicated", Setting("sparse_dist", placement="sharded")),
        (SERIAL, plain),
        ("serial + balancing", balanced("serial", "collective")),
        ("serial + hostwire", replace(plain, transport="hostwire")),
        ("staged", replace(plain, schedule="staged")),
        (UNBALANCED, replace(plain, schedule="staged", transport="hostwire")),
        ("staged + balancing", balanced("staged", "collective")),
        (ALL, balanced("staged", "hostwire")),
        ("stale + balancing + hostwire", balanced("stale", "hostwire")),
    ]
    if trained is not None and trained not in [setting for _, setting in arms]:
        arms.append((AS_TRAINED, trained))
    return arms


class Plans:
    """The batches of a workload, planned once for each partitioner."""

    def __init__(
        self, cluster: Cluster, source: Workload, steps: int, dynamic: Dynamic | None = None
    ) -> None:
        self.cluster, self.source, self.steps, self.dynamic = cluster, source, steps, dynamic
        self.place = cache(self._place)
        self._plan = cache(partial(plan_batches, cluster=cluster, source=source, steps=steps))

    def _place(self, placement: str, cache_miss: float) -> PlacedTables:
        machine = (self.cluster.model, self.source, self.cluster.gpus)
        return place_tables(placement, *machine, cache_miss, self.dynamic, self.steps)

    def simulate(
        self,
        label: str,
        setting: Setting,
        *,
        network: Network | None = None,
        steps: int | None = None,
        folder: Path | None = None,
    ) -> Outcome:
        """Simulates one configuration, on another network or over fewer steps if given."""
        begin = time.perf_counter()
        cluster = self.cluster if network is None else replace(self.cluster, network=network)
        count = steps or self.steps
        planned = () if setting.adapt else self._plan(setting.balance)[:count]
        tables = self.place(setting.placement, setting.cache_miss)
        steps_made = simulate(setting, cluster, self.source, count, planned, tables)
        figures = collect_run(steps_made, cluster.gpus, folder)
        return Outcome(label, setting, cluster.gpus, figures, time.perf_counter() - begin)


def improve_network(network: Network) -> dict[str, Network]:
    """Makes variants of a network, each with one part twice as good."""
    names = {
        "near": "links inside a node twice as fast",
        "far": "network cards twice as fast",
        "pcie": "PCIe twice as fast",
    }
    links: dict[str, Any] = {way: getattr(network, way) for way in names}
    changed = {
        names[way]: replace(network, **{way: replace(link, gb_per_s=2 * link.gb_per_s)})
        for way, link in links.items()
    }
    half = {way: replace(link, latency_us=link.latency_us / 2) for way, link in links.items()}
    quicker = replace(network, **half, per_peer_us=network.per_peer_us / 2)
    return changed | {"half the latency and cost per peer": quicker}


def run_simulation(
    config: SimulateConfig,
    gpus: Sequence[int],
    report: Callable[[Outcome], None] = lambda one: None,
) -> dict[str, Any]:
    """Simulates all configurations on all numbers of GPUs, and calls `report` with each outcome.
    Returns everything that the command prints, as plain data. ValueError if an option is out of
    range."""
    out = Path(config.out) if config.out else None
    run = read_trained_run(config.run) if config.run else None
    trained = describe_training(config, run.config if run else None)
    own = compare_with_run(run, config) if run else None
    rows: list[dict[str, Any]] = []
    changes: list[dict[str, Any]] = []
    notes: list[str] = list_omissions(trained)
    verdicts: list[str] = []
    growth: list[dict[str, Any]] = []
    dynamic = find_dynamic(config)
    for count in gpus:
        cluster = build_cluster(config, count, trained)
        source = build_workload(config, count, trained)
        if isinstance(source, RecordedWorkload):
            source.shard_large_tables(cluster.model, count)
        plans = Plans(cluster, source, config.steps, dynamic)
        found: dict[str, Outcome] = {}
        own_setting = run.make_setting(config.transport) if run else None
        for label, setting in list_arms(config, own_setting):
            folder = out / f"{count}-{re.sub('[^a-z]+', '-', label.lower())}" if out else None
            found[label] = plans.simulate(label, setting, folder=folder)
            report(found[label])
            rows.append(found[label].row)
        notes += [
            *cluster.calibration.list_notes(cluster.model, source.get_lengths(0)),
            *source.notes,
        ]
        tables = plans.place(config.placement, config.cache_miss)
        growth += list_growth(tables.growth, count)
        size = f"{count:,} x {cluster.network.gpu}, {config.batch:,} samples each"
        notes += [f"{size}: {line}" for line in tables.describe()]
        notes += [f"network: {cluster.network.name} ({cluster.network.about})"]
        measured = cluster.calibration.machine.get("gpu") or ""
        if measured and cluster.network.gpu not in ("GPU", *measured.split()):
            notes.append(f"each {cluster.network.gpu} is taken to compute as the {measured} does")
        if isinstance(source, RecordedWorkload):
            notes.append(source.describe_error(count))
        changed = _compare_changes(config, plans, found)
        changes += changed
        named = {label: one.row for label, one in found.items()}
        verdicts.append(write_verdict(named, changed, cluster.network.gpu))
    data = {
        "config": asdict(config),
        "own": own,
        "notes": list(dict.fromkeys(notes)),
        "rows": rows,
        "changes": changes,
        "growth": growth,
        "verdicts": verdicts,
    }
    if out is not None:
        (out / "simulate.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data


def _compare_changes(
    config: SimulateConfig, plans: Plans, found: dict[str, Outcome]
) -> list[dict[str, Any]]:
    """Predicts the gain in samples per second of a better part of the machine, or of a larger
    batch."""
    steps = min(config.steps, 5)
    arms = {label: found[label].setting for label in (SERIAL, ALL, GIVEN) if label in found}
    made = []
    twice = None
    if not config.data:
        source = build_workload(replace(config, batch=2 * config.batch), plans.cluster.gpus)
        twice = Plans(plans.cluster, source, steps, plans.dynamic)
    for label, setting in arms.items():
        base = plans.simulate(label, setting, steps=steps)
        for what, network in improve_network(plans.cluster.network).items():
            changed = plans.simulate(label, setting, network=network, steps=steps)
            made.append(_compare(label, what, base, changed))
        if twice is not None:
            made.append(_compare(label, "twice the batch", base, twice.simulate(label, setting)))
    return made


def _compare(label: str, what: str, base: Outcome, changed: Outcome) -> dict[str, Any]:
    gain = 100 * (changed.figures["samples_per_second"] / base.figures["samples_per_second"] - 1)
    row = {"gpus": base.gpus, "arm": label, "change": what}
    return row | {"more_samples_per_second_percent": gain}
