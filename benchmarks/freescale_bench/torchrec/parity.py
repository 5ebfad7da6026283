"""Parity of TorchRec's unmodified models, trained by FreeScale and by TorchRec's modules with
torch's optimizers in one process: one step from five states, and the losses of ten steps.

FreeScale trains in one process, and on two ranks that both get the batch of the single process.
Batches cannot be split, because DlrmHSTU divides its attention by the longest history of the batch.
Schedules serial and staged; float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import freescale
from freescale.launch.ranks import is_rank
from freescale.torchrec import Pipeline, load_checkpoint, parallelize
from freescale.torchrec.sharded_model import ShardedModel
from freescale.transport.api import Transport
from freescale_bench.common.ranks import join, start_ranks
from freescale_bench.common.results import Destination, Row, at_most, write
from freescale_bench.torchrec.dlrm import Shape, build_dlrm, make_batch
from freescale_bench.torchrec.dlrm_hstu import build_dlrm_hstu, make_samples

STEPS = 10
STATES = range(0, STEPS, 2)  # steps after which a single step is compared
DENSE_LR = 0.05
OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "SGD": (freescale.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "row-wise Adagrad": (
        freescale.RowWiseAdagrad(lr=0.02, eps=1e-8),
        lambda p: RowWiseAdagrad(p, lr=0.02, eps=1e-8),
    ),
}
SMALL = Shape(rows=1000, width=16, samples=48, factor=3, bottom=(32,), top=(32, 1))
LIMIT, SECONDS = 1200.0, 120.0  # limits of the whole run and of a collective

State = dict[str, Any]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]


def list_cases(peer: Path | None) -> dict[str, Case]:
    cases = {"DLRM": Case(lambda: build_dlrm(SMALL), lambda seed: make_batch(SMALL, seed))}
    if peer is not None:
        cases["DlrmHSTU"] = Case(
            lambda: build_dlrm_hstu(peer), lambda seed: make_samples(seed, samples=24)
        )
    return cases


def train_torchrec(case: Case, optimizer: str) -> tuple[list[float], list[State]]:
    """Returns losses, and the state before each step and after the last."""
    model = case.build()
    named = dict(model.named_parameters())
    tables = {name: p for name, p in named.items() if _is_table(name)}
    dense = {name: p for name, p in named.items() if name not in tables}
    both = CombinedOptimizer(
        [
            KeyedOptimizerWrapper(tables, OPTIMIZERS[optimizer][1]),
            KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, lr=DENSE_LR)),
        ]
    )
    losses, states = [], []
    for seed in range(STEPS):
        states.append(_copy({"model": model.state_dict(), "optimizer": both.state_dict()}))
        both.zero_grad()
        loss = model(case.make_batch(seed))[0]
        loss.backward()
        both.step()
        losses.append(loss.item())
    states.append(_copy({"model": model.state_dict(), "optimizer": both.state_dict()}))
    return losses, states


def train_here(
    case: Case,
    optimizer: str,
    schedule: str,
    transport: Transport | None,
    state: State,
    seeds: range,
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains from a state. Returns losses, and the weights after the last step."""
    sharded = parallelize(
        case.build(), OPTIMIZERS[optimizer][0], transport=transport, placement="sharded"
    )
    dense = torch.optim.SGD(sharded.dense_parameters(), lr=DENSE_LR)
    load_checkpoint(state, sharded, dense)
    pipeline = Pipeline(sharded, dense, schedule=schedule, check=False)
    losses = [float(result.loss) for result in pipeline.run(map(case.make_batch, seeds))]
    pipeline.flush()
    return losses, gather_weights(sharded)


def gather_weights(sharded: ShardedModel) -> dict[str, Tensor]:
    """Gathers whole weights on every rank, by the model's own names. A collective."""
    tables, transport = sharded.tables, sharded.transport
    weights = {n: p.detach().clone() for n, p in sharded.module.model.named_parameters()}
    for name, spec in tables.specs.items():
        ids, local = tables.get_local_rows(name)
        whole = local.new_zeros(spec.rows, spec.width)
        whole[ids] = local
        weights[f"{name}.weight"] = transport.all_reduce(whole, "dense").wait()
    return weights


def compare(case: Case, optimizer: str, transport: Transport) -> list[Row]:
    expected, states = train_torchrec(case, optimizer)
    rows: list[Row] = []
    for ranks, joined in ((1, None), (transport.world, transport)):
        whole = {
            schedule: train_here(case, optimizer, schedule, joined, states[0], range(STEPS))
            for schedule in ("serial", "staged")
        }
        (losses, weights), (staged_losses, staged) = whole["serial"], whole["staged"]
        step = 0.0
        for number in STATES:
            seeds = range(number, number + 1)
            _, after = train_here(case, optimizer, "staged", joined, states[number], seeds)
            step = max(step, _differ(after, states[number + 1]["model"]))
        rows.append(
            {
                "optimizer": optimizer,
                "ranks": ranks,
                "one_step_difference": step,
                "loss_difference": max(
                    abs(a - b) for a, b in zip(staged_losses, expected, strict=True)
                ),
                "staged_equals_serial": losses == staged_losses
                and all(torch.equal(weights[name], staged[name]) for name in weights),
                "losses": expected,
            }
        )
    return rows


def _is_table(name: str) -> bool:
    return ".embedding_bags." in name or ".embeddings." in name


def _copy(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().clone()
    return {name: _copy(value) for name, value in state.items()}


def _differ(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    trained = {name: value for name, value in expected.items() if name in actual}
    assert len(trained) == len(actual)
    return max(
        float((actual[name] - value).abs().max())
        for name, value in trained.items()
        if value.numel()
    )


def bench_parity(peer: Path | None, to: Destination) -> int:
    """Starts two ranks, or runs as one of them. Returns the exit status."""
    given = ["--peer", str(peer)] if peer is not None else []
    if not is_rank():
        arguments = ["parity", *given, *to.as_arguments()]
        return start_ranks("torchrec", arguments, 2, "cpu", LIMIT, threads=1)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # TorchRec makes it warn at every start
    transport = join("cpu", SECONDS)
    rows: list[Row] = []
    claims = []
    for name, case in list_cases(peer).items():
        found = [row for optimizer in OPTIMIZERS for row in compare(case, optimizer, transport)]
        rows += [{"model": name, **row} for row in found]
        for text, key, target in (
            ("one step from five states, largest difference of a weight", "one_step_difference", 1),
            ("losses of 10 steps, largest difference", "loss_difference", 10),
        ):
            worst = max(row[key] for row in found)
            claims.append(at_most(f"{name}: {text}", target, 1e6 * worst, "millionths"))
        differ = sum(not row["staged_equals_serial"] for row in found)
        text = "runs whose staged losses and weights are not serial's to the bit"
        claims.append(at_most(f"{name}: {text}", 0, differ, "runs"))
    if transport.rank == 0:
        command = "freescale bench torchrec parity" + " --peer FOLDER" * (peer is not None)
        packages = ("torchrec", "fbgemm-gpu-cpu")
        write("torchrec-parity", "cpu", command, rows, claims, packages, to=to)
    transport.close()
    return 0
