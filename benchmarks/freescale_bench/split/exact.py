"""Steps with one divided history against steps with the whole one, on the same ranks: gradients,
not weights, whose rounding is large against a gradient.

Gradients of dense parameters are read after each step. Those of rows are what the rows change by,
at a rate of as many as there are tokens: a change is then about as large as a row."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.pipeline.pipeline import Pipeline
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.api import Transport
from freescale_bench.common.ranks import gather_json, open_rank
from freescale_bench.common.results import Destination, Row, at_most, write
from freescale_bench.split.setting import (
    SETTINGS,
    SPLIT,
    WHOLE,
    Setting,
    Shape,
    build_pipeline,
    make_batch,
    shrink,
)

CPU = Shape(16, 2, 1, (8192,))
CUDA = Shape(256, 4, 4, (65_536,))
STEPS = 2
WORST = 6  # tensors whose errors are kept
State = dict[str, Tensor]


def choose_shape(setting: Setting) -> Shape:
    shape = CPU if setting.device == "cpu" else CUDA
    return shrink(shape, shape.lengths[0] // 700) if setting.trial else shape


def bench(setting: Setting, to: Destination) -> None:
    """Starts the ranks of each world, with the checkpoint of the largest, which others resume."""
    cpu = setting.device == "cpu"
    worlds = (4, 1, 2, 3) if cpu else (4,)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        rows += [setting.run_ranks("exact", folder, world) for world in worlds]
    rows.sort(key=lambda row: int(row["ranks"]))
    text = f"one history of {choose_shape(setting).lengths[0]:,} events, {{}}"
    error = max(row["error"] for row in rows)
    if cpu:
        claims = [at_most(text.format("float64, 1 to 4 ranks: against whole"), 1e-12, error, "x")]
        for name, words in (
            ("staged_differs", "tensors that differ between staged and serial"),
            ("resumed_error", "resumed on 1 to 3 ranks from 4: against undisturbed"),
        ):
            limit, worst = (0, 1e-12)[name != "staged_differs"], max(row[name] for row in rows)
            claims.append(at_most(text.format(words), limit, worst, ""))
    else:
        claims = [at_most(text.format("float32, 4 ranks: against whole"), 1e-5, error, "x")]
    claims[0]["measured"] = error  # four digits would show 0
    if not setting.trial:
        name = "split-exact" if cpu else "split-exact-4ranks"
        shape = choose_shape(setting).describe()
        write(
            name, setting.testbed, setting.name_command("exact"), rows, claims, to=to, shape=shape
        )


def measure(setting: Setting, folder: str, output: Path) -> None:
    """As one of the ranks; rank 0 writes the row."""
    with open_rank(setting.device, setting.limit) as (transport, _):
        found = gather_json(transport, _measure(setting, Path(folder), transport))
    if transport.rank == 0:
        errors = [rank.pop("errors") for rank in found]
        by_name = {name: max(rank[name] for rank in errors) for name in errors[0]}
        row = {name: max(rank[name] for rank in found) for name in found[0]}
        parts = sum(rank["parts"] for rank in found)
        row = {"ranks": len(found), "error": max(by_name.values())} | row | {"parts": parts}
        row["errors"] = dict(sorted(by_name.items(), key=lambda each: -each[1])[:WORST])
        output.write_text(json.dumps(row), encoding="utf-8")


def _measure(setting: Setting, folder: Path, transport: Transport) -> dict[str, Any]:
    shape, cpu = choose_shape(setting), setting.device == "cpu"
    begin, dtype = time.perf_counter(), torch.float64 if cpu else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    arms = [(WHOLE, "serial"), (SPLIT, "serial")] + [(SPLIT, "staged")] * cpu
    losses, states, weights, parts = [], [], [], 0
    for arm, schedule in arms:
        pipeline = _build(shape, transport, arm, dtype, schedule)
        before = _copy_rows(pipeline)
        keep = folder if cpu and arm == SPLIT and transport.world == 4 else None
        gradients: State = {}
        keep = keep if schedule == "serial" else None
        losses.append(_train(shape, transport, pipeline, keep, gradients))
        after = _copy_rows(pipeline)
        gradients |= {f"rows {name}": after[name] - before[name] for name in after}
        states.append(gradients)
        dense = pipeline.model.module.state_dict()
        weights.append(after | {name: x.clone() for name, x in dense.items()})
        seconds = time.perf_counter() - begin
        if transport.rank == 0:
            print(f"{transport.world} ranks, {arm} {schedule}: {seconds:.0f} s", flush=True)
        records = pipeline.ledger.drain()
        if arm == SPLIT:
            parts = int(sum(record["counters"].get("split_parts", 0) for record in records))
            parts //= STEPS
        pipeline.close()
        del pipeline
    whole, split = states[:2]
    row: dict[str, Any] = {"parts": parts, "errors": _compare(split, whole)}
    row["loss_error"] = max(abs(a / b - 1) for a, b in zip(losses[1], losses[0], strict=True))
    if cpu:
        pairs = ((split, states[2]), (weights[1], weights[2]))
        different = [n for a, b in pairs for n in a if not torch.equal(a[n], b[n])]
        row["staged_differs"] = len(different)
        row["resumed_error"] = 0.0
        if transport.world < 4:
            row["resumed_error"] = _resume(shape, transport, folder)
    return row


def _build(
    shape: Shape, transport: Transport, arm: str, dtype: torch.dtype, schedule: str = "staged"
) -> Pipeline:
    rate = float(sum(shape.lengths))
    return build_pipeline(
        shape, transport, SETTINGS[arm], dtype=dtype, schedule=schedule, row_rate=rate
    )


def _train(
    shape: Shape, transport: Transport, pipeline: Pipeline, keep: Path | None, gradients: State
) -> list[float]:
    """Losses; fills `gradients` with those of dense parameters by step. Keeps a checkpoint after
    the first step, and the dense weights after the last."""
    losses = []
    batches = [make_batch(shape, transport.rank, transport.world, n) for n in range(STEPS)]
    for result in pipeline.run(batches):
        losses.append(float(result.loss))
        for name, parameter in pipeline.model.module.named_parameters():
            if parameter.grad is not None:
                gradients[f"{name}, step {result.step}"] = parameter.grad.clone()
        if keep is not None and result.step == 1:
            progress = {"step": 1, "pipeline": pipeline.state_dict()}
            Checkpoints(str(keep), transport).save(pipeline.model, pipeline.optimizer, progress)
    pipeline.flush()
    if keep is not None and transport.rank == 0:
        torch.save(pipeline.model.module.state_dict(), keep / "dense.pt")
    return losses


def _resume(shape: Shape, transport: Transport, folder: Path) -> float:
    """The largest difference of dense weights to those of the run that was not interrupted."""
    pipeline = _build(shape, transport, SPLIT, torch.float64)
    checkpoints = Checkpoints(str(folder), transport)
    progress = checkpoints.load(checkpoints.path(1), pipeline.model, pipeline.optimizer)
    pipeline.load_state_dict(progress["pipeline"])
    for _ in pipeline.run([make_batch(shape, transport.rank, transport.world, STEPS - 1)]):
        pass
    pipeline.flush()
    expected = torch.load(folder / "dense.pt", weights_only=True)
    found = pipeline.model.module.state_dict()
    error = max(_relate(found[name], value) for name, value in expected.items())
    pipeline.close()
    return error


def _copy_rows(pipeline: Pipeline) -> State:
    """This rank's rows."""
    if not pipeline.model.tables.placed:
        pipeline.model.tables.place()
    rows = pipeline.model.tables.get_group("item").rows.get_tensors("item")
    return {name: x.detach().clone() for name, x in rows.items()}


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: _relate(found[name], value) for name, value in expected.items()}


def _relate(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if not expected.numel():
        return 0.0
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / scale if scale else 0.0
