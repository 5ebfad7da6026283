"""Predicts the training of a recipe on clusters of several sizes: whether its tables fit, samples
per second, and the time to a number of samples.

The global batch is the recipe's, whatever the number of GPUs. Steps are those of the simulator,
with the compute curve of plain HSTU layers; their projections take more here, in proportion to the
floating-point operations that MLPerf counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray

from freescale.config import RunConfig, SimulateConfig
from freescale.config.features import REQUEST, Feature, parse_features
from freescale.embedding.layout import ShardLayout, TableSpec
from freescale.embedding.optimizers import choose_row_optimizer
from freescale.embedding.placement import count_state_bytes
from freescale.simulate.compute import Curve, Shape
from freescale.simulate.generated_workload import GeneratedWorkload, PooledFeatures
from freescale.simulate.inputs import build_cluster
from freescale.simulate.run import Plans
from freescale.simulate.simulator import Cluster, Setting
from freescale.simulate.workload import PooledDemand

PRESETS = ("paper", "h200")  # nodes of 8 H100, and of 8 H200
GPUS = (8, 16, 32, 64)
SAMPLES = 69_300_000  # mean of the reference runs until an AUC of 0.75, with batches of 8,192
COUNTED_TOKENS = 4096  # tokens of a sample, as MLPerf counts operations
# Events of a pool, of the rare pool of likes, and tokens of the request and the candidate.
_POOL, _LIKES, _OTHERS = 1362, 105, 9
TOKENS = 2 * _POOL + _LIKES + _OTHERS  # mean of a sample
_ROOM = 0.9  # share of a GPU's memory that training may use
_KEPT = 11  # numbers of 16 bits that backward needs of each layer, per token and unit of width
_DENSE_BYTES = 16  # of a dense parameter: itself, its gradient, two moments
# Projections of plain HSTU layers, and of those that also project the gate and the residual.
_PLAIN, _WIDE = 4 + 1, 4 + 3
_NOTHING = Curve(0.0, 0.0)


@dataclass(frozen=True)
class Plan:
    """The prediction for one cluster. Times are None if it does not fit."""

    gpu: str
    gpus: int
    batch: int  # samples of a GPU
    tables_gb: float  # of a GPU
    memory_gb: float  # of a GPU, used
    room_gb: float
    micro_batches: int
    samples_per_second: float | None = None
    step_ms: float | None = None
    exposed_percent: float | None = None
    tflops: float | None = None  # of a GPU, by MLPerf's count
    hours: float | None = None  # to SAMPLES

    @property
    def fits(self) -> bool:
        return self.samples_per_second is not None


def plan_recipe(config: SimulateConfig, gpus: Sequence[int], presets: Sequence[str]) -> list[Plan]:
    """Predicts each number of GPUs of each preset.

    Raises:
        ValueError: the recipe does not name the sizes of its tables, or fits nowhere.
    """
    recipe = RunConfig.from_settings({"data": "-", "recipe": config.recipe})
    specs = list_tables(recipe)
    plans = [_plan(config, recipe, specs, preset, count) for preset in presets for count in gpus]
    if not any(plan.fits for plan in plans):
        last = plans[-1]
        raise ValueError(
            f"recipe {config.recipe}: its tables take {last.tables_gb:.1f} GB on each of "
            f"{last.gpus} {last.gpu}, and {last.room_gb:.1f} GB are there for everything; give "
            "more GPUs"
        )
    return plans


def list_tables(recipe: RunConfig) -> list[TableSpec]:
    """The tables of a recipe that names all their sizes: `num_items`, and the rows of each
    feature."""
    features = parse_features(recipe.data.features)
    sized = all(feature.rows and feature.kind in ("id", "cross") for feature in features)
    both = {_describes_items(feature) for feature in features} == {True, False}
    if recipe.data.num_items is None or not (sized and both):
        raise ValueError(
            f"recipe {recipe.model.recipe}: the sizes of its tables follow from data; name "
            "num_items and, as dlrm-v4 does, the rows of features of items (artist=id:ROWS) and "
            "requests (user*artist=cross:ROWS)"
        )
    rows = {"item": recipe.data.num_items, "item_features": 1, "context_features": 1}
    for feature in features:
        name = "item_features" if _describes_items(feature) else "context_features"
        rows[name] += feature.rows + (feature.kind == "id")  # one for ids without a row
    width = recipe.model.width
    return [TableSpec(name, count, width, torch.float32, (name,)) for name, count in rows.items()]


def _describes_items(feature: Feature) -> bool:
    return feature.kind == "id" and feature.name not in REQUEST


def count_flops(recipe: RunConfig, tokens: int = COUNTED_TOKENS) -> float:
    """Floating-point operations of a sample, forward and backward, by MLPerf's formula: causal
    attention, the projection to u, v, q and k, and the one back, of three times the width."""
    width = recipe.model.width
    attention = 3.5 * 2 * (tokens**2 / 2) * 2 * width
    projections = 3 * 2 * tokens * width * width * _WIDE
    return recipe.model.layers * (attention + projections)


def count_table_bytes(recipe: RunConfig, specs: Sequence[TableSpec], gpus: int) -> int:
    """Bytes of rows and their optimizer's state on each GPU, with tables cut by rows."""
    layout, optimizer = ShardLayout(tuple(specs), gpus), choose_row_optimizer(recipe.train)
    return sum(
        layout.block(place) * (spec.bytes_per_row + count_state_bytes(optimizer, spec))
        for place, spec in enumerate(specs)
    )


def count_sample_bytes(recipe: RunConfig) -> int:
    """Bytes that a sample takes until its backward has ended: what the layers keep, and its inputs
    and their gradients in 32 bits."""
    return TOKENS * recipe.model.width * (2 * _KEPT * recipe.model.layers + 2 * 4)


@dataclass(frozen=True)
class _SeveralFeatures(PooledFeatures):
    """Features of a sample, and others with another number of ids."""

    others: PooledFeatures

    def compute_demand(
        self, samples: NDArray[Any], before: NDArray[Any] | None, after: NDArray[Any] | None
    ) -> PooledDemand:
        own = super().compute_demand(samples, before, after)
        others = self.others.compute_demand(samples, before, after)
        return PooledDemand(
            own.whole + others.whole,
            own.late + others.late,
            own.urgent + others.urgent,
            own.ids + others.ids,
            own.bags + others.bags,
        )


def _plan(
    config: SimulateConfig, recipe: RunConfig, specs: Sequence[TableSpec], preset: str, gpus: int
) -> Plan:
    batch, model = recipe.train.global_batch // gpus, recipe.model
    given: dict[str, Any] = {"width": model.width, "layers": model.layers, "heads": model.heads}
    given |= {"row_optimizer": recipe.train.row_optimizer, "cap": COUNTED_TOKENS, "batch": batch}
    cluster = build_cluster(replace(config, preset=preset, **given), gpus)
    network = cluster.network
    if not network.memory_gb:
        raise ValueError(f"network {network.name}: memory_gb, of a GPU, is missing; add it")
    tables, room = count_table_bytes(recipe, specs, gpus), _ROOM * network.memory_gb * 1e9
    fixed = tables + _DENSE_BYTES * cluster.model.parameters
    at_once = int((room - fixed) // count_sample_bytes(recipe))
    parts = math.ceil(batch / at_once) if at_once > 0 else 0
    used = fixed + math.ceil(batch / max(parts, 1)) * count_sample_bytes(recipe)
    plan = Plan(network.gpu, gpus, batch, tables / 1e9, used / 1e9, room / 1e9, max(parts, 1))
    if not parts or batch < 1:
        return plan
    figures = _simulate(config, recipe, specs, cluster)
    rate = figures["samples_per_second"]
    return replace(
        plan,
        samples_per_second=rate,
        step_ms=figures["step_ms"]["mean"],
        exposed_percent=figures["exposed_percent"],
        tflops=rate * count_flops(recipe) / gpus / 1e12,
        hours=SAMPLES / rate / 3600,
    )


def _simulate(
    config: SimulateConfig, recipe: RunConfig, specs: Sequence[TableSpec], cluster: Cluster
) -> dict[str, Any]:
    """The figures of a step, as ledger.json."""
    rows = {spec.name: spec.rows for spec in specs}
    features = parse_features(recipe.data.features)
    described = sum(map(_describes_items, features))
    requested, events = len(features) - described, TOKENS - _OTHERS
    power = config.popularity
    crosses = PooledFeatures(requested, 1, rows["context_features"] // requested, power)
    of_events = rows["item_features"] // described
    pooled = _SeveralFeatures(described, events, of_events, power, crosses)
    source = GeneratedWorkload(
        recipe.train.global_batch // cluster.gpus * cluster.gpus,
        median=TOKENS,
        sigma=0.0,
        cap=COUNTED_TOKENS,
        items=rows["item"],
        popularity=power,
        collisions=None,
        seed=config.seed,
        pooled=pooled,
    )
    curve = cluster.calibration
    cluster = replace(cluster, calibration=replace(curve, shapes=tuple(map(_widen, curve.shapes))))
    setting = Setting(
        config.schedule or "staged", config.balance, config.transport, placement="sharded"
    )
    return Plans(cluster, source, config.steps).simulate("planned", setting).figures


def _widen(shape: Shape) -> Shape:
    """The curves of layers that project more, and of a head that reads candidates alone."""
    ways = {way: getattr(shape, way) for way in ("forward", "backward")}
    wider = {w: replace(curve, linear=curve.linear * _WIDE / _PLAIN) for w, curve in ways.items()}
    return replace(shape, **wider, head_forward=_NOTHING, head_backward=_NOTHING)


def describe_plans(recipe: RunConfig) -> list[str]:
    """What the table rests on."""
    batch, counted = recipe.train.global_batch, count_flops(recipe) / 1e9
    return [
        f"PREDICTED, not measured: {SAMPLES:,} samples in batches of {batch:,}, without "
        "evaluations, data preparation and the overhead of micro-batches",
        f"TFLOP/s of a GPU: MLPerf counts {COUNTED_TOKENS:,} tokens of a sample, {counted:.1f} "
        f"GFLOP; samples have {TOKENS:,} on average, {count_flops(recipe, TOKENS) / 1e9:.1f} GFLOP",
        "compute: the shipped curve of an H200, for H100s too; projections take 7/5 of its time",
        f"memory: {_ROOM:.0%} of a GPU's; a token keeps {_KEPT} x width numbers of 16 bits in each "
        "layer (assumed)",
    ]
