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
        self._windows: list[tuple[Any, Any] | None] = []
        self._unread: list[Callable[[], Tensor]] = []  # exchanges of a rank without parts
        self._sending: list[Callable[[], Tensor]] = []  # exchanges that bring nothing here
        self._forward = False
        self.begun = 0  # exchanges of the step under way: other ranks may wait for them

    def attach(self, batch: SequenceBatch) -> SequenceBatch:
        """The batch as the model takes it. A rank without parts starts all its exchanges here."""
        parts = batch.divided
        self.begun, self._forward = 0 if parts is None else self._count, True
        if parts is None:
            return batch
        if parts.starts:
            exchange = partial(self._start, parts.send, parts.receive)
            return replace(batch, divided=replace(parts, exchange=exchange))
        nothing, none = torch.empty(0, device=self._lane.device), [0] * self._lane.transport.world
        self._unread = [self._start(none, none, nothing, True) for _ in range(self._count)]
        return replace(batch, divided=None)

    def end_forward(self) -> None:
        """What was sent without waiting has left: a GPU's allocator waits for sums over ranks, and
        they for ranks that wait for keys."""
        self._forward = False
        for wait in self._sending:
            wait()
        self._sending = []

    def finish(self) -> None:
        """Ends the compute of a step: its exchanges are recorded at the same place on all ranks."""
        for wait in self._unread:
            wait()
        self._unread = []
        windows, self._windows = self._windows, []
        if len(windows) != self.begun:
            raise ValueError(
                "the model does not read the parts of divided histories (`SequenceBatch.divided`), "
                "as Retrieval and Ranking do: split_histories='off'"
            )
        for collective, window in zip(self._lane.side.take(), windows, strict=True):
            collective.window = window
            self._ledger.record(collective)
        self.begun = 0

    def rest(self) -> None:
        """Between runs: no thread is left."""
        self._windows, self._unread, self._sending = [], [], []
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

        job, place = self._lane.submit(travel, (rows,)), len(self._windows)
        self._windows.append(None)

        def wait() -> Tensor:
            begin = self._lane.side.clock.stamp()
            job.wait()
            self._windows[place] = begin, self._lane.side.clock.stamp()
            self._lane.lend(arrived[0])
            return arrived[0]

        if any(receive) or not self._forward:
            return wait
        # The first part of a history waits for nobody: it computes its next layer meanwhile.
        self._sending.append(wait)
        return lambda: rows.new_empty(0, *rows.shape[1:])
