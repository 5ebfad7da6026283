"""`ShardedModel`: a model whose tables are spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from torch import nn

from freescale.batch import SequenceBatch, check_is_batch
from freescale.embedding.tables import Tables
from freescale.transport.api import Transport
from freescale.transport.failures import failing_together


class ShardedModel:
    """What `parallelize` returns: a model whose embeddings are tables over all ranks.

    Train it with a `Pipeline`, evaluate it with `freescale.evaluate`, save it with `Checkpoints`.

    Attributes:
        module: the model itself, with readers in the place of its embeddings.
        tables: the tables, with their placement and row optimizers.
    """

    def __init__(self, module: nn.Module, tables: Tables) -> None:
        self.module = module
        self.tables = tables

    @property
    def transport(self) -> Transport:
        """What connects the ranks."""
        return self.tables.transport

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Self:
        """Sets training mode (dropout and the like), as `nn.Module.train` does."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Sets evaluation mode, as `nn.Module.eval` does."""
        return self.train(False)

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """Everything that is not a table, replicated on every rank: what a torch optimizer takes.
        Rows of tables are updated by row optimizers instead."""
        return self.module.parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The dense parameters: tables are no parameters."""
        return self.dense_parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. Outside a pipeline its rows have to be fetched first: see `reading`."""
        return self.module(*args, **kwargs)

    @contextmanager
    def reading(self, batch: SequenceBatch | None = None) -> Iterator[SequenceBatch]:
        """Fetches the rows that a batch reads, so that the model can be called with it, without
        gradients:

            with sharded.reading(batch) as batch:
                scores = sharded(batch)

        Works before the first step and between steps; deferred gradients are applied first. Does
        not change the training mode: call `eval` if the model needs it. A collective: every rank
        enters, one that has no batch with None. Features that only training needs may be missing.
        Yields the batch on the device of the model. TypeError or ValueError if this rank's batch
        cannot be read, RemoteError if another rank's cannot.
        """
        with failing_together(self.transport):
            batch = self.check_batch(SequenceBatch() if batch is None else batch)
        with torch.no_grad(), self.rows_fetched(batch):
            yield batch

    def check_batch(self, batch: SequenceBatch) -> SequenceBatch:
        """The batch on the device of the model; refuses ids that the tables do not have."""
        self.tables.check(check_is_batch(batch), strict=False)
        return batch.to(self.transport.device)

    @contextmanager
    def rows_fetched(self, batch: SequenceBatch) -> Iterator[None]:
        """The rows of a checked batch are here. A collective."""
        self.tables.lease.flush()
        if not self.tables.placed:
            self.tables.place(batch)
        requests = self.tables.set.request([batch])
        self.tables.open(self.tables.set.fetch(requests, train=False))
        try:
            yield
        finally:
            self.tables.close()

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses: no rank holds the whole model."""
        raise RuntimeError(
            "a sharded model has no state_dict, since no rank holds its tables whole: save it with "
            "freescale.Checkpoints(folder, transport).save(sharded, optimizer, {'step': step}), "
            "and freescale.export(checkpoint, folder) writes whole tables; "
            "sharded.module.state_dict() is the dense part"
        )

    def load_state_dict(self, state: Mapping[str, Any], *_: Any, **__: Any) -> NoReturn:
        """Refuses: no rank holds the whole model."""
        raise RuntimeError(
            "a sharded model has no state_dict to load into: load a checkpoint with "
            "freescale.Checkpoints(folder, transport).load(path, sharded, optimizer), or load the "
            "weights into the plain model before parallelize, which keeps them"
        )

    def __repr__(self) -> str:
        transport = self.transport
        dense = list(self.dense_parameters())
        lines = [
            f"ShardedModel({type(self.module).__name__}, rank {transport.rank} of "
            f"{transport.world} on {transport.device}",
            *(f"  {line}" for line in self.tables.describe()),
            f"  dense: {sum(p.numel() for p in dense):,} values in {len(dense)} parameters)",
        ]
        return "\n".join(lines)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards each submodule is in the mode that it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
