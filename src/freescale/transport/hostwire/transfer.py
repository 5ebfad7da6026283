"""What a channel of hostwire carries: a transfer, its rounds, the parts of a round, and the pieces
that a part is cut into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freescale.streams import current_stream
from freescale.transport.hostwire.gate import Gate


@dataclass(frozen=True)
class Part:
    """Bytes of a transfer to or from one peer, whole."""

    peer: int
    bytes: Tensor  # [n], of the tensor that is sent or received


@dataclass
class Round:
    """Parts that travel together. A ring has several: a round sends what the one before it
    brought."""

    parts: Sequence[Part]
    # of received rounds: what they brought can be sent on
    landed: threading.Event = field(default_factory=threading.Event)
    after: Round | None = None


class Transfer:
    """What is waited for. `urgent` transfers are given way to."""

    def __init__(
        self,
        kind: str,
        out: Sequence[Round],
        into: Sequence[Round],
        urgent: bool,
        device: torch.device,
    ) -> None:
        self.kind, self.out, self.into, self.urgent, self.device = kind, out, into, urgent, device
        self.cuda = device.type == "cuda"
        self.error: BaseException | None = None
        # a core that waits for compute is free for others
        self.begun = recorded(device, blocking=True)
        self.size = sum(part.bytes.numel() for round_ in out for part in round_.parts)
        self.arrived: torch.cuda.Event | None = None
        self._halves = 2
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._gate: Gate | None = None  # that it has begun to be urgent at
        # sends and receives it, in the thread that waits
        self.carry: Callable[[Transfer], None] | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def ready(self, gate: Gate) -> None:
        """What it sends is there. From now on, if it is urgent, bulk gives way to it: not while the
        device still computes it."""
        with self._lock:
            if self.urgent and not self.done:
                self._gate = gate
                gate.begin()

    def half_done(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._halves -= 1
            over = not self.done and (self._halves == 0 or error is not None)
            if over:
                self.error = error
                self._done.set()
        if over:
            self.out, self.into = (), ()
            if self._gate is not None:
                self._gate.end()

    def wait(self) -> None:
        """What the caller issues from now on has the result. Whoever sends and receives keeps the
        time."""
        if self.carry is not None and not self.done:
            self.carry(self)
        self._done.wait()
        if self.error is not None:
            raise self.error
        if self.arrived is not None:
            current_stream(self.device).wait_event(self.arrived)


def cut(size: int, largest: int) -> list[int]:
    """Bytes of the pieces of a part, the same on both sides. Its first and last quarter are pieces,
    so that the stages begin and end soon after each other; what is between is cut less often: every
    copy takes some microseconds more than its bytes do."""
    quarter = -(-size // 4 // 4096) * 4096
    end = min(largest, max(quarter, 1 << 20))
    if size <= 2 * end:
        return [part for part in (min(size, end), size - end) if part > 0]
    between = min(largest, 2 * end)
    whole, rest = divmod(size - 2 * end, between)
    return [end, *[between] * whole, *([rest] if rest else []), end]


def recorded(device: torch.device, blocking: bool = False, stream: Any = None) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=blocking)
    event.record(stream if stream is not None else current_stream(device))
    return event
