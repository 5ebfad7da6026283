"""FreeScale on the shared workload (common/workload.py), with the same methods as TorchRec's
arms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import freescale
from freescale.batch import Jagged, SequenceBatch
from freescale.embedding.optimizers import SGD, Adagrad, RowWiseAdagrad
from freescale.ledger.ledger import Collective, Ledger
from freescale.pipeline.schedule import Schedule
from freescale.pipeline.staged import Staged
from freescale.pipeline.step_result import StepResult
from freescale.transport.api import Transport
from freescale.transport.connect import agree_on_transport
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.local import LocalTransport
from freescale.transport.process_group import ProcessGroupTransport
from freescale_bench.common.workload import (
    Dense,
    Workload,
    make_batches,
    make_dense_optimizer,
    make_table_rows,
)


def make_row_optimizer(workload: Workload) -> SGD | Adagrad | RowWiseAdagrad:
    lr, eps = workload.row_learning_rate, workload.row_epsilon
    if workload.row_optimizer == "sgd":
        return SGD(lr=lr)
    return (Adagrad if workload.row_optimizer == "adagrad" else RowWiseAdagrad)(lr=lr, eps=eps)


class Model(nn.Module):
    """A plain module, as a user would write it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.item = nn.Embedding(workload.rows, workload.width, device="meta")
        self.dense = Dense(workload)

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        history, labels = batch.sequences["history"], batch.dense["labels"]
        rows = self.item(history.values)
        return {"click": self.dense(rows, history.lengths, labels, history.host_lengths)}


def feed(
    workload: Workload, rank: int, world: int, permuted: bool = False, pinned: bool = False
) -> Iterator[SequenceBatch]:
    ones = torch.ones(workload.samples)
    random = torch.Generator().manual_seed(rank)
    made = [
        SequenceBatch(
            sequences={"history": Jagged(ids, lengths)},
            dense={"labels": labels},
            weights={"click": ones},
        )
        for ids, lengths, labels in make_batches(workload, rank, world)
    ]
    for batch in itertools.cycle([batch.pin_memory() for batch in made] if pinned else made):
        yield (
            batch.select(torch.randperm(workload.samples, generator=random)) if permuted else batch
        )


class WaitLedger(Ledger):
    """Counts how long the main thread waited for other threads, whatever they did: sending, looking
    up, updating."""

    def record_wait(self, collectives: list[Collective], begin: Any) -> None:
        super().record_wait(collectives, begin)
        self.count("lanes_ns", self.clock.stamp() - begin)


def open_transport(
    device: torch.device | str, ledger: Ledger, transport_name: str
) -> tuple[ProcessGroupTransport, str]:
    """Opens a separate transport for an arm over torch's default group. Returns it and its name:
    `auto` is resolved by agreement between the ranks, as in training. A collective."""
    limit = timedelta(seconds=120)
    cpu = torch.device(device).type == "cpu"
    control = None if cpu else dist.new_group(backend="gloo", timeout=limit)
    plain = ProcessGroupTransport(device, ledger, control=control, timeout=limit)
    carrier, _, machines = agree_on_transport(transport_name, plain)
    if carrier != "collective":
        wire = carrier.removeprefix("hostwire-")
        plain = HostwireTransport(device, ledger, plain.group, plain.control, wire)
    plain.machines = machines
    return plain, carrier


def wait_for_lanes(pipeline: freescale.Pipeline) -> None:
    """Waits until nothing is in flight. What the schedule has deferred stays deferred."""
    if isinstance(pipeline.schedule, Staged):
        for lane in pipeline.schedule.lanes:
            lane.submit(lambda: None).wait()  # jobs of a lane run in order


class Running:
    """One rank at work. Subclasses set `pipeline` and `_steps`, the iterator of its results."""

    pipeline: freescale.Pipeline
    _steps: Iterator[StepResult]

    def step(self) -> float:
        """Trains a step, a collective. Returns its loss: the mean over the samples of all ranks."""
        return float(self.begin_step())

    def begin_step(self) -> Tensor:
        """The same without reading the loss, which would wait for the device."""
        return next(self._steps).total

    def quiet(self) -> None:
        wait_for_lanes(self.pipeline)


class Arm(Running):
    """One rank of FreeScale."""

    def __init__(
        self,
        workload: Workload,
        rank: int,
        world: int,
        schedule: str | Callable[..., Schedule] = "serial",
        transport: str = "collective",
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        """Builds the model and its pipeline. A collective.

        Args:
            transport: `local` for a single process.
            options: of the pipeline, and `permuted` (permute the samples of every batch), `pinned`
                (pin the batches), `placement` (of the table), `own_rows` (keep FreeScale's initial
                rows), `exchange` (flat or two-level). The precision is fp32: the model casts by
                itself (`Dense`) in every arm.
        """
        self.ledger = WaitLedger(device) if device == "cpu" else Ledger(device)
        self.transport: Transport
        if transport == "local":
            self.transport, self.carrier = LocalTransport(device, self.ledger), transport
        else:
            self.transport, self.carrier = open_transport(device, self.ledger, transport)
        fed = {name: options.pop(name, False) for name in ("permuted", "pinned")}
        placement = options.pop("placement", "sharded")
        own_rows, exchange = options.pop("own_rows", False), options.pop("exchange", "auto")
        model = Model(workload)
        self.parallel = freescale.parallelize(
            model,
            {"item": ["history"]},
            make_row_optimizer(workload),
            transport=self.transport,
            placement={"item": placement},
            exchange=exchange,
        )
        self.parallel.tables.place()
        if not own_rows:
            rows = self.parallel.tables.get_group("item").rows
            for ids, part in rows.iterate_chunks("item"):
                part.copy_(make_table_rows(workload, ids))
            self.parallel.tables.reload()
        self.dense: Dense = model.dense
        optimizer = make_dense_optimizer(workload, self.parallel.dense_parameters())
        self.pipeline = freescale.Pipeline(
            self.parallel, optimizer, schedule=schedule, **{"precision": "fp32", **options}
        )
        self._steps = self.pipeline.run(feed(workload, rank, world, **fed))

    def close(self) -> None:
        self.transport.gather_bytes(b"")
