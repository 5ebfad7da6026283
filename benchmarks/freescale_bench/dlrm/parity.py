"""Parity of `DlrmRanking` with the public DlrmHSTU: copied weights, the same batches, in plain
torch on a CPU, in float32. Logits, losses, and gradients of all parameters.

The public attention is divided by the batch's longest sample: every batch has a history of full
length. In plain torch the public model has as many time buckets as it has columns, less one, which
its kernels do not: the model here gets as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale_bench.common.results import Destination, Row, Target, make_claims, write
from freescale_bench.dlrm.public import Inputs, build_public, convert_batch, pair_parameters
from freescale_bench.dlrm.shapes import SMALL, TASK, Shape, build_model, make_batch

# as wide as the real one, with few rows and short histories
WIDE = replace(SMALL, name="dlrm_v4_hstu, short", width=512, heads=4, layers=3, longest=120)
_JUDGE = "_multitask_module._prediction_module"
BATCHES, SAMPLES = 3, 8
TARGETS = (
    Target("logits", "largest difference of a logit", 10, "millionths", at_least=False),
    Target("loss", "largest difference of a loss", 10, "millionths", at_least=False),
    Target(
        "gradients", "largest difference of a gradient, of its parameter's largest", 100,
        "millionths", at_least=False,
    ),
)  # fmt: skip


def bench_parity(folder: Path, trial: bool, to: Destination) -> None:
    rows: list[Row] = []
    for shape in (SMALL,) if trial else (SMALL, WIDE):
        shape = replace(shape, time_buckets=shape.width - 1, positions=8192)
        rows += compare(shape, folder)
    for row in rows:
        print(row, flush=True)
    figures = {each.figure: 1e6 * max(row[each.figure] for row in rows) for each in TARGETS}
    if not trial:
        claims = make_claims(TARGETS, figures)
        command, packages = "freescale bench dlrm parity --public FOLDER", ("torchrec",)
        write("dlrm-parity", "cpu", command, rows, claims, (*packages, "fbgemm-gpu-cpu"), to=to)


def compare(shape: Shape, folder: Path) -> list[Row]:
    """Compares some batches. Returns a row for each."""
    public, model = build_public(shape, folder), build_model(shape)
    _disturb(public)
    given = dict(public.named_parameters())
    pairs = dict(pair_parameters(model, public, shape))
    assert pairs.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, find in pairs.items():
            model.get_parameter(name).copy_(find(given.__getitem__))
    rows = []
    for seed in range(BATCHES):
        lengths = np.random.default_rng(seed).integers(1, shape.longest, SAMPLES)
        lengths[seed % SAMPLES] = shape.longest
        batch = make_batch(shape, lengths, seed)
        theirs = _run_public(public, convert_batch(shape, batch))
        model.zero_grad(set_to_none=True)
        with _record_outputs(model.judge) as outputs:
            loss = 0.2 * model(batch)[TASK] / len(batch)  # --task-weights
        loss.backward()
        found = {name: find(theirs["gradients"].__getitem__) for name, find in pairs.items()}
        worst = _find_worst(model, found)
        rows.append(
            {
                "shape": shape.name,
                "width": shape.width,
                "tokens": int(lengths.sum()) + SAMPLES * (len(shape.context) + 1),
                "logits": _differ(outputs[0], theirs["logits"]),
                "loss": _differ(loss, theirs["loss"]),
                "gradients": worst[0],
                "worst_parameter": worst[1],
                "parameters": len(pairs),
                "largest_logit": float(outputs[0].abs().max()),
            }
        )
    return rows


def _disturb(model: nn.Module) -> None:
    """No bias may be 0, no norm the identity, and no logit close to 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.get_parameter(f"{_JUDGE}.2.weight").mul_(8)


@contextmanager
def _record_outputs(judge: nn.Module) -> Iterator[list[Tensor]]:
    """Yields the list that the logits of one task go to."""
    found: list[Tensor] = []
    hook = judge.register_forward_hook(lambda *call: found.append(call[2].detach()[:, 0]))
    yield found
    hook.remove()


def _run_public(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    model.train().zero_grad(set_to_none=True)
    with _record_outputs(model.get_submodule(_JUDGE)) as logits:
        losses = model(*inputs)[2]
    losses[TASK].backward()
    named = dict(model.named_parameters())
    zeros = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    return {"logits": logits[0], "loss": losses[TASK], "gradients": zeros}


def _find_worst(model: nn.Module, theirs: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient, as a share of the parameter's largest gradient."""
    found = []
    for name, parameter in model.named_parameters():
        mine, largest = parameter.grad, float(theirs[name].abs().max())
        assert mine is not None and largest > 0, name
        found.append((_differ(mine, theirs[name]) / largest, name))
    return max(found)


def _differ(one: Tensor, other: Tensor) -> float:
    return float((one.detach() - other.detach()).abs().max())
