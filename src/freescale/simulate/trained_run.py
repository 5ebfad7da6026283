"""A run's folder as input of the simulator: its settings and the measurements of its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freescale.config import RunConfig, SimulateConfig
from freescale.embedding.host_tables.tiers import parse_tier
from freescale.report.runs import read_run
from freescale.simulate.inputs import find_dynamic, place_on_network, read_workload
from freescale.simulate.network import Network, load_preset
from freescale.simulate.output import collect_run
from freescale.simulate.placed_tables import place_tables
from freescale.simulate.simulator import Setting, simulate


@dataclass(frozen=True)
class TrainedRun:
    """The settings and measurements of a run."""

    config: RunConfig
    ledger: Mapping[str, Any]  # ledger.json; empty if nothing was measured

    @property
    def ranks(self) -> int | None:
        """None without a ledger."""
        return self.ledger.get("ranks")

    @property
    def item_placement(self) -> str:
        wanted = self.config.placements
        item = wanted if isinstance(wanted, str) else wanted.get("item", "auto")
        return "host" if parse_tier(item) is not None else item

    @property
    def cache_miss(self) -> float:
        """Percent of a step's rows that the caches missed; 100 if not measured."""
        measured = self.ledger.get("cache_miss_percent")
        return 100.0 if measured is None else float(measured)

    @property
    def machines(self) -> list[Mapping[str, Any]]:
        """One without figures if they are not known."""
        return self.ledger.get("machines") or [{}]

    @property
    def carries_by_hostwire(self) -> bool:
        """Whether hostwire carried rows and gradients; if not measured, by the settings."""
        paths = self.ledger.get("paths", {})
        carriers = [path for kind in ("ids", "rows", "samples") for path in paths.get(kind, {})]
        paths = [*carriers, self.config.train.transport]
        return any(path.startswith("hostwire") for path in paths)

    def make_setting(self, transport: str) -> Setting:
        """The configuration of the run, over a transport of the simulator."""
        train = self.config.train
        adapt = train.balance_adapt and train.balance != "none"
        chosen = (train.schedule, train.balance, transport, adapt, self.item_placement)
        return Setting(*chosen, cache_miss=self.cache_miss)


def read_trained_run(folder: str | Path) -> TrainedRun:
    """Reads config.json and ledger.json. ValueError if the folder is not that of a run, or a file
    in it is damaged."""
    path = Path(folder)
    run = read_run(path)
    if not run.config:
        raise ValueError(
            f"{path} has no config.json, which says what was trained: name the folder of a run of "
            "`freescale train`"
        )
    return TrainedRun(RunConfig.read(path), run.ledger if run.measured else {})


def list_settings(run: TrainedRun) -> dict[str, Any]:
    """The options of `freescale simulate` that follow from the run. Each GPU has as many samples as
    a rank of the run."""
    data, model, train = run.config.data, run.config.model, run.config.train
    decided = {
        "data": data.data,
        "cache": data.cache,
        "cap": data.max_length,
        "width": model.width,
        "layers": model.layers,
        "heads": model.heads,
        "attend": model.attend,
        "batch": -(-train.global_batch // (run.ranks or 1)),
        "adapt": train.balance_adapt,
        "split_histories": train.split_histories,
        "placement": run.item_placement,
        "cache_miss": run.cache_miss,
        "rows": train.rows,
        "row_optimizer": train.row_optimizer,
        "seed": train.seed,
    }
    # Without balancing in the run, the techniques are shown with the default partitioner.
    return decided | ({} if train.balance == "none" else {"balance": train.balance})


def compare_with_run(run: TrainedRun, config: SimulateConfig) -> dict[str, Any] | None:
    """Simulates the run on its own ranks, to compare with the measurements of its ledger. Of the
    options only the GPUs' network, the calibration and the steps are used.

    Returns plain data: `ranks`, `notes`, and `rows` of figure, simulated and measured. None if
    nothing was measured, or the ranks are spread unevenly over machines.
    """
    if run.ranks is None:
        return None
    network = _choose_own_network(run, config)
    if network is None:
        return None
    names = ("cap", "width", "layers", "heads", "attend", "row_optimizer", "split_histories")
    decided = list_settings(run)
    shape = replace(config, **{name: decided[name] for name in names})
    calibration = None if network.device == "cpu" else config.calibration
    trained = replace(run.config, data=replace(run.config.data, data=config.data or ""))
    cluster = place_on_network(shape, run.ranks, network, calibration, trained)
    source = read_workload(trained, run.config.train.global_batch)
    source.shard_large_tables(cluster.model, run.ranks)
    setting = run.make_setting("hostwire" if run.carries_by_hostwire else "collective")
    steps = max(3, min(config.steps, int(run.ledger["steps"])))
    dynamic = find_dynamic(replace(config, rows=run.config.train.rows))
    tables = place_tables(
        setting.placement, cluster.model, source, run.ranks, setting.cache_miss, dynamic, steps
    )
    found = collect_run(simulate(setting, cluster, source, steps, tables=tables), run.ranks)
    return {
        "ranks": run.ranks,
        "notes": [
            f"simulated on: {network.about}",
            *cluster.calibration.list_notes(cluster.model, source.get_lengths(0)),
            *_compare_machines(run.machines[0], cluster.calibration.machine),
            *tables.describe(),
        ],
        "rows": list_compared_figures(found, run.ledger),
    }


def _choose_own_network(run: TrainedRun, config: SimulateConfig) -> Network | None:
    """The run's ranks on the links of the preset, or of a CPU machine."""
    counts = {len(machine.get("ranks", range(run.ranks or 1))) for machine in run.machines}
    if len(counts) > 1:
        return None
    preset = load_preset(config.preset if run.machines[0].get("gpu") else "this-machine")
    return replace(preset, gpus_per_node=counts.pop())


def _compare_machines(own: Mapping[str, Any], calibrated: Mapping[str, Any]) -> list[str]:
    """Warns if the curve was measured on another device than the run's."""
    kind = "gpu" if own.get("gpu") else "cpu"
    mine, theirs = own.get(kind), calibrated.get(kind)
    if not mine or mine == theirs:
        return []
    return [
        f"OTHER MACHINE: the run computed on {mine}, the curve was measured on {theirs}: compare "
        "bytes and shares, or measure a curve of your own with `freescale simulate calibrate`"
    ]


def list_compared_figures(
    simulated: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Mean figures of both ledgers: {"figure", "simulated", "measured"}; None if a step has no such
    figure."""
    rows = [
        ("step, ms", simulated["step_ms"]["mean"], measured["step_ms"]["mean"]),
        *(
            (f"{name}, ms", simulated["spans_ms"].get(name), measured.get("spans_ms", {}).get(name))
            for name in ("forward", "backward")
        ),
        ("straggler, %", simulated["straggler_percent"], measured["straggler_percent"]),
        ("exposed, %", simulated["exposed_percent"], measured["exposed_percent"]),
        ("collisions, %", simulated["collision_percent"], measured.get("collision_percent")),
    ]
    for kind, sent in measured.get("bytes_per_step", {}).items():
        rows.append((f"{kind}, kB", simulated["bytes_per_step"].get(kind, 0.0) / 1e3, sent / 1e3))
    return [{"figure": name, "simulated": a, "measured": b} for name, a, b in rows]
