"""What travels between the parts of divided histories: keys and values of a layer, gradients back.

Lane `parts` carries it while other samples compute. Every rank starts the same exchanges in the
same order in a step that divides a history, those without parts with nothing to send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freescale.batch import SequenceBatch
from freescale.pipeline.lane import Lane
from freescale.transport.api import Sizes, Transport


class PartsExchange:
    """Of one schedule."""

    def __init__(self, module: nn.Module, transport: Transport) -> None:
        """A collective: opens a channel. ValueError if the module cannot divide histories."""
        encoder: Any = getattr(module, "encoder", module)
        count = encoder.count_exchanges() if hasattr(encoder, "count_exchanges") else None
        if count is None:
            raise ValueError(
                f"histories cannot be divided over ranks with {type(encoder).__name__}, only with "
                "HSTU: split_histories='off'"
            )
        self.about = (
            "layers of divided histories run one by one between the exchanges, not fused and "
            f"without CUDA graphs; recompute {'sends keys again' if encoder.checkpoint else 'off'}"
        )
        self._count: int = count
        self._lane = Lane("parts", transport, urgent=True)
        self._ledger = transport.ledger
        # when the main thread began to wait for each exchange of the step, and when it had ended
        self._windows: list[tuple[Any, Any]] = []
        self._joined: list[Callable[[], Tensor]] = []
        self._begun = 0  # exchanges of the step

    def attach(self, batch: SequenceBatch) -> SequenceBatch:
        """The batch as the model takes it. A rank without parts starts all its exchanges here."""
        parts = batch.divided
        self._begun = 0 if parts is None else self._count
        if parts is None:
            return batch
        if parts.starts:
            exchange = partial(self._start, parts.send, parts.receive)
            return replace(batch, divided=replace(parts, exchange=exchange))
        nothing, none = torch.empty(0, device=self._lane.device), [0] * self._lane.transport.world
        self._joined = [self._start(none, none, nothing, False) for _ in range(self._count)]
        return replace(batch, divided=None)

    def finish(self) -> None:
        """Ends the compute of a step: its exchanges are recorded at the same place on all ranks."""
        for wait in self._joined:
            wait()
        self._joined = []
        windows, self._windows = self._windows, []
        if len(windows) != self._begun:
            raise ValueError(
                "the model does not read the parts of divided histories (`SequenceBatch.divided`), "
                "as Retrieval and Ranking do: split_histories='off'"
            )
        for collective, window in zip(self._lane.side.take(), windows, strict=True):
            collective.window = window
            self._ledger.record(collective)

    def rest(self) -> None:
        """Between runs: no thread is left."""
        self._windows, self._joined = [], []
        self._lane.side.take()  # drops the work of a failed step
        self._lane.rest()

    def close(self) -> None:
        """Gives the channel back. A collective."""
        self._lane.close()

    def _start(self, send: Sizes, receive: Sizes, rows: Tensor, back: bool) -> Callable[[], Tensor]:
        """An `Exchange`."""
        send, receive = (receive, send) if back else (send, receive)
        rows = rows.contiguous()
        arrived: list[Tensor] = []

        def travel() -> None:
            transport = self._lane.transport
            arrived.append(transport.all_to_all(rows, send, receive, "attention").wait())

        job = self._lane.submit(travel, (rows,))

        def wait() -> Tensor:
            begin = self._lane.side.clock.stamp()
            job.wait()
            self._windows.append((begin, self._lane.side.clock.stamp()))
            self._lane.lend(arrived[0])
            return arrived[0]

        return wait
