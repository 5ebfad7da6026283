"""The simulator against measured runs of testbeds A and C, from committed results only.
`freescale bench simulate validate` runs it.

Curves are fitted to one configuration of each testbed (see calibrations.py; these rows are
`fitted`). The others are predicted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from freescale.simulate.compute import Calibration, Curve, Model, Shape, load_calibration
from freescale.simulate.network import Network, load_preset
from freescale.simulate.output import collect_run
from freescale.simulate.simulator import Cluster, Setting, simulate
from freescale.simulate.workload import Demand, Rows, SmallTable
from freescale_bench.common.results import Destination, Row, at_most, read_committed, write
from freescale_bench.common.workload import draw_lengths

STEP, POINTS = 10.0, 2.0  # targets: percent of the step time; points of the step


class Given:
    """A benchmark's workload: lengths [steps][ranks][samples], rows per rank, and the share of them
    that collides."""

    notes: list[str] = []
    bytes_per_token, bytes_per_sample = 16, 0
    items = 1 << 40  # never replicated: the benchmarks shard their tables

    def __init__(
        self, lengths: list[np.ndarray], rows: np.ndarray | float, collisions: float
    ) -> None:
        self._lengths, self._rows, self._collisions = lengths, rows, collisions

    def list_small_tables(self, ranks: int) -> list[SmallTable]:
        return []

    def get_lengths(self, step: int) -> np.ndarray:
        return self._lengths[step % len(self._lengths)].reshape(-1).astype(np.int64)

    def find_requests(self, step: int, rank_of: np.ndarray, ranks: int) -> np.ndarray:
        return np.broadcast_to(np.asarray(self._rows, float), (ranks,)).copy()

    def compute_demand(self, before: Any, now: np.ndarray, after: Any) -> Demand:
        late, shared = (0.0 if other is None else self._collisions for other in (before, after))
        whole, colliding, urgent = (Rows.spread(now * share) for share in (1.0, late, shared))
        return Demand(whole, colliding, urgent)


def compare(
    testbed: str,
    name: str,
    arm: str,
    fitted: bool,
    predicted: dict[str, Any],
    measured: dict[str, float],
) -> dict[str, Any]:
    """Compares predicted with measured figures. `fitted`: the curve or the network comes from this
    row."""
    mine = {
        "step_ms": predicted["step_ms"]["median"],  # the machines are shared
        "compute_ms": sum(predicted["compute_ms_per_rank"]) / predicted["ranks"],
        "straggler_percent": predicted["straggler_percent"],
        "exposed_percent": predicted["exposed_percent"],
    }
    row: Row = {
        "testbed": testbed,
        "configuration": name,
        "arm": arm,
        "fitted": fitted,
        "predicted": mine,
        "measured": measured,
    }
    row["step_error_percent"] = 100 * (mine["step_ms"] / measured["step_ms"] - 1)
    row["straggler_points"] = mine["straggler_percent"] - measured["straggler_percent"]
    row["exposed_points"] = mine["exposed_percent"] - measured["exposed_percent"]
    good = abs(row["step_error_percent"]) <= STEP
    near = max(abs(row["straggler_points"]), abs(row["exposed_points"])) <= POINTS
    shown = [f"{key} {mine[key]:.1f} / {measured[key]:.1f}" for key in mine]
    verdict = f"{'' if good else 'STEP '}{'' if near else 'POINTS'}"
    print(
        f"{testbed} {name:20s} {arm:8s}{'*' if fitted else ' '}",
        "  ".join(shown),
        f"({row['step_error_percent']:+.1f} %)",
        verdict,
    )
    return row


def compare_testbed_a() -> list[dict[str, Any]]:
    """Compares two hosts, 200 Mbit/s, a token-wise MLP with unique ids (staged-hosts.json)."""
    rows = []
    for row in read_committed("staged-hosts")["rows"]:
        if (
            row.get("ids") != "unique"
            or row["arm"] not in ("serial", "staged", "stale")
            or row["sweep"] not in ("collisions", "lengths")
        ):
            continue
        model = Model(128, row["passes"], 1, "fp32", row["length"], dense=8515)
        cluster = Cluster(model, load_calibration("testbed-a"), load_preset("testbed-a"), 2)
        share = row["collisions"] / 100
        source = Given([np.full((2, 64), row["length"])], 64.0 * row["length"], share)
        found = collect_run(simulate(Setting(row["arm"]), cluster, source, 12), 2)
        step = row["step_ms"]["median"]
        measured = {
            "step_ms": step,
            "compute_ms": row["compute_ms"],
            "straggler_percent": 100 * row["straggler_ms"]["median"] / step,
            "exposed_percent": 100 * row["exposed_all_ms"]["median"] / step,
        }
        fitted = row["configuration"] == "0 % collisions" and row["arm"] in ("serial", "stale")
        rows.append(compare("A", row["configuration"], row["arm"], fitted, found, measured))
    return rows


def compare_hstu(
    testbed: str, name: str, calibration: Calibration, network: Network, fitted: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Compares HSTU with balancing (`freescale bench balance measured`), with its lengths and
    partitioners."""
    data = read_committed(name)
    shape, world = data["shape"], data["rows"][0]["ranks"]
    lengths = []
    for number in range(data["steps"]):
        streams = [np.random.default_rng((7, rank, number)) for rank in range(world)]
        sizes = shape["median"], shape["samples"], shape["cap"]
        lengths.append(np.stack([draw_lengths(random, *sizes) for random in streams]).astype(float))
    precision = "bf16" if testbed == "C" else "fp32"
    model = Model(shape["width"], shape["layers"], shape["heads"], precision, shape["cap"])
    # Ids are uniform: history and targets of a rank read this many items.
    tokens = np.mean([step.sum(axis=1).mean() for step in lengths])
    unique = shape["items"] * -np.expm1(
        (2 * tokens + 64 * shape["samples"]) * np.log1p(-1 / shape["items"])
    )
    rows = []
    for row in data["rows"]:
        adapt = row["arm"] == "adapted"
        setting = Setting("serial", "greedy" if adapt else row["arm"], adapt=adapt)
        cluster = Cluster(model, calibration, network, world)
        found = collect_run(
            simulate(
                setting,
                cluster,
                Given(lengths, unique, row["collision_percent"] / 100),
                data["steps"],
            ),
            world,
        )
        measured = {"step_ms": row["step_ms"]["median"], "mean_step_ms": row["step_ms"]["mean"]}
        measured |= {"compute_ms": sum(row["compute_ms_per_rank"]) / world}
        measured |= {k: row[k] for k in ("straggler_percent", "exposed_percent")}
        rows.append(
            compare(
                testbed,
                name.removeprefix("balance-measured-"),
                row["arm"],
                row["arm"] in fitted,
                found,
                measured,
            )
        )
    return rows


def compare_shared_gpu(quarter: Calibration, network: Network) -> list[dict[str, Any]]:
    """Compares four ranks on one H200, an MLP with unique ids (`freescale bench staged --device
    cuda`): serial over NCCL, the others over hostwire."""
    data = read_committed("staged-4ranks-h200")
    tokens, passes = 53_000, 12
    spans = data["rows"][0]["spans_ms"]
    curves = [
        Curve(0.0, spans[way]["median"] / 1e3 / passes / tokens) for way in ("forward", "backward")
    ]
    # The measured forward and backward include reading rows.
    work = replace(quarter.rows, read_per_byte=0.0, read_backward_per_byte=0.0)
    calibration = replace(quarter, shapes=(Shape(128, 1, "bf16", 1000, *curves),), rows=work)
    cluster = Cluster(Model(128, passes, 1, "bf16", 1000, dense=329_088), calibration, network, 4)
    lengths = [np.full((4, 128), tokens / 128)]
    rows = []
    for row in data["rows"]:
        setting = Setting(
            row["arm"], transport="collective" if row["arm"] == "serial" else "hostwire"
        )
        found = collect_run(
            simulate(setting, cluster, Given(lengths, float(tokens), data["collisions"]), 20), 4
        )
        step = row["step_ms"]["median"]
        measured = {"step_ms": step, "compute_ms": row["compute_ms"]["median"]}
        measured["straggler_percent"] = row["straggler_percent"]["median"]
        measured["exposed_percent"] = (
            100 * sum(kind["median"] for kind in row["exposed_ms"].values()) / step
        )
        rows.append(
            compare("C", "staged-4ranks", row["arm"], row["arm"] == "serial", found, measured)
        )
    return rows


def halve(calibration: Calibration) -> Calibration:
    """Doubles all times: each rank has half as much of the device."""

    def twice(curve: Curve) -> Curve:
        return Curve(
            *(2 * value for value in (curve.quadratic, curve.linear, curve.sample, curve.constant))
        )

    shapes = tuple(
        replace(shape, forward=twice(shape.forward), backward=twice(shape.backward))
        for shape in calibration.shapes
    )
    return replace(calibration, shapes=shapes)


def validate(to: Destination) -> None:
    quarter, loopback = load_calibration("testbed-c"), load_preset("testbed-c")
    # Twice the ranks on one GPU and one host: each has half of the device and of the loopback.
    shared = replace(loopback.near, gb_per_s=loopback.near.gb_per_s / 2)
    rows = compare_testbed_a()
    rows += compare_hstu(
        "A",
        "balance-measured-2ranks-cpu",
        load_calibration("this-machine"),
        load_preset("this-machine"),
        (),
    )
    rows += compare_hstu("C", "balance-measured-4ranks-h200", quarter, loopback, ("none",))
    rows += compare_hstu(
        "C", "balance-measured-8ranks-h200", halve(quarter), replace(loopback, near=shared), ()
    )
    rows += compare_shared_gpu(quarter, loopback)
    claims = []
    for testbed in ("A", "C"):
        blind = [row for row in rows if row["testbed"] == testbed and not row["fitted"]]
        for text, key, target, unit in (
            (
                "step time, predicted against measured, largest of the rows that no curve was "
                "taken from",
                "step_error_percent",
                STEP,
                "%",
            ),
            ("straggler %, largest distance", "straggler_points", POINTS, "points"),
            ("exposed communication, largest distance", "exposed_points", POINTS, "points"),
        ):
            worst = max(abs(row[key]) for row in blind)
            within = sum(abs(row[key]) <= target for row in blind)
            claims.append(
                at_most(
                    f"testbed {testbed}: {text} ({within} of {len(blind)} rows within)",
                    target,
                    worst,
                    unit,
                )
            )
    write("simulate", "validation", "freescale bench simulate validate", rows, claims, to=to)
