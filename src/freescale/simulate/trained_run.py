"""A run's folder as the simulator's input: what it trained, and what its ledger measured."""

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
    """What a folder says about its run."""

    folder: Path
    config: RunConfig
    ledger: Mapping[str, Any]  # ledger.json; empty if nothing was measured

    @property
    def ranks(self) -> int | None:
        """None where no ledger says it."""
        return self.ledger.get("ranks")

    @property
    def item_placement(self) -> str:
        wanted = self.config.placements
        item = wanted if isinstance(wanted, str) else wanted.get("item", "auto")
        return "host" if parse_tier(item) is not None else item

    @property
    def cache_miss(self) -> float:
        """Percent of a step's rows that its caches missed; unmeasured, all."""
        measured = self.ledger.get("cache_miss_percent")
        return 100.0 if measured is None else float(measured)

    @property
    def machine(self) -> Mapping[str, Any]:
        machines = self.ledger.get("machines") or [{}]
        first: Mapping[str, Any] = machines[0]
        return first

    @property
    def carries_by_hostwire(self) -> bool:
        """What carried rows and gradients; unmeasured, what the settings ask for."""
        paths = self.ledger.get("paths", {})
        carriers = [path for kind in ("ids", "rows", "samples") for path in paths.get(kind, {})]
        asked = self.config.train.transport
        return any(path.startswith("hostwire") for path in [*carriers, asked])

    def make_setting(self, transport: str) -> Setting:
        """The configuration of the run, over a transport of the simulator."""
        train = self.config.train
        adapt = train.balance_adapt and train.balance != "none"
        return Setting(
            train.schedule,
            train.balance,
            transport,
            adapt,
            self.item_placement,
            cache_miss=self.cache_miss,
        )


def read_trained_run(folder: str | Path) -> TrainedRun:
    """Reads config.json and ledger.json.

    Raises:
        ValueError: It is not the folder of a run, or a file in it is damaged.
    """
    path = Path(folder)
    run = read_run(path)
    if not run.config:
        raise ValueError(
            f"{path} has no config.json, which says what was trained: name the folder of a run of "
            "`freescale train`"
        )
    config = RunConfig.from_json((path / "config.json").read_text(encoding="utf-8"))
    return TrainedRun(path, config, run.ledger if run.measured else {})


def list_settings(run: TrainedRun) -> dict[str, Any]:
    """The options of `freescale simulate` that the run decides. Each GPU has as many samples as a
    rank of the run."""
    data, model, train = run.config.data, run.config.model, run.config.train
    decided = {
        "data": data.data,
        "cache": data.cache,
        "cap": data.max_length,
        "width": model.width,
        "layers": model.layers,
        "heads": model.heads,
        "batch": -(-train.global_batch // (run.ranks or 1)),
        "adapt": train.balance_adapt,
        "placement": run.item_placement,
        "cache_miss": run.cache_miss,
        "rows": train.rows,
        "row_optimizer": train.row_optimizer,
        "seed": train.seed,
    }
    # Without balancing in the run, the techniques are shown with the usual partitioner.
    return decided | ({} if train.balance == "none" else {"balance": train.balance})


def compare_with_run(run: TrainedRun, config: SimulateConfig) -> dict[str, Any] | None:
    """Simulates the run on its own ranks, beside what its ledger measured.

    Args:
        run: The run.
        config: The options, of which the network of GPUs, the calibration and the steps count.

    Returns:
        Plain data: `ranks`, `notes`, and `rows` of figure, simulated and measured. None
        where nothing was measured, or by ranks that are spread unevenly over machines.
    """
    if run.ranks is None:
        return None
    network = _choose_own_network(run, config)
    if network is None:
        return None
    on_cpu = network.device == "cpu"
    shape = replace(
        config,
        cap=run.config.data.max_length,
        width=run.config.model.width,
        layers=run.config.model.layers,
        heads=run.config.model.heads,
        row_optimizer=run.config.train.row_optimizer,
    )
    calibration = None if on_cpu else config.calibration
    trained = replace(run.config, data=replace(run.config.data, data=config.data or ""))
    cluster = place_on_network(shape, run.ranks, network, calibration, trained)
    source = read_workload(trained, run.config.train.global_batch)
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
            *_compare_machines(run.machine, cluster.calibration.machine),
            *tables.describe(),
        ],
        "rows": list_compared_figures(found, run.ledger),
    }


def _choose_own_network(run: TrainedRun, config: SimulateConfig) -> Network | None:
    """The machines of the run: its ranks on the preset's links, or on a CPU's."""
    machines = run.ledger.get("machines") or [{}]
    counts = {len(machine.get("ranks", range(run.ranks or 1))) for machine in machines}
    if len(counts) > 1:
        return None
    preset = load_preset(config.preset if run.machine.get("gpu") else "this-machine")
    return replace(preset, gpus_per_node=counts.pop())


def _compare_machines(own: Mapping[str, Any], calibrated: Mapping[str, Any]) -> list[str]:
    """Warns where the curve is of another device than the run's."""
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
    """Figures that both ledgers have: {"figure", "simulated", "measured"}; None where a step has
    no such thing. Means over the steps."""
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
