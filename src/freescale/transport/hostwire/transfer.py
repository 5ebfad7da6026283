"""What a channel of hostwire carries: a transfer, its rounds, the blocks of a round, and the pieces
that a block is cut into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freescale.streams import current_stream, record_event_on
from freescale.transport.api import TransportError
from freescale.transport.hostwire.gate import Gate


@dataclass(frozen=True)
class Block:
    """The bytes of a transfer to or from one peer, whole."""

    peer: int
    bytes: Tensor  # [n], of the tensor that is sent or received


@dataclass
class Round:
    """Blocks that travel together. A ring has several rounds: one sends what the one before it
    brought."""

    blocks: Sequence[Block]
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
        # What is sent is there, and what is received into is free. Blocking: a core that waits for
        # compute is free for others.
        self.inputs_ready = record_event_on(device, blocking=True)
        self.arrived: torch.cuda.Event | None = None
        # drives it, in the thread that waits; None: threads of the channel do
        self.drive: Callable[[Transfer], None] | None = None
        self._unfinished = 2  # directions
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._gate: Gate | None = None  # that it holds

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def hold_gate(self, gate: Gate) -> None:
        """From now on, if it is urgent, bulk gives way to it. Called when its inputs are ready: not
        while the device still computes them."""
        with self._lock:
            if self.urgent and not self.done:
                self._gate = gate
                gate.begin()

    def finish_direction(self, error: BaseException | None = None) -> None:
        """It was sent, or received; or it failed, which ends both directions."""
        with self._lock:
            self._unfinished -= 1
            over = not self.done and (self._unfinished == 0 or error is not None)
            if over:
                self.error = error
                self._done.set()
        if over:
            self.out, self.into = (), ()
            if self._gate is not None:
                self._gate.end()

    def wait(self) -> None:
        """Waits; what the current stream does next has the result. Whoever sends and receives keeps
        the time. Raises what ended the transfer."""
        if self.drive is not None and not self.done:
            self.drive(self)
        self._done.wait()
        if self.error is not None:
            raise self.error
        if self.arrived is not None:
            current_stream(self.device).wait_event(self.arrived)


def make_error(
    rank: int, kind: str, urgent: bool, peer: int, left: int, reason: str
) -> TransportError:
    """The error of `rank` for a transfer that a peer leaves unfinished, with `left` bytes to go."""
    return TransportError(
        f"rank {rank}: {'urgent' if urgent else 'bulk'} exchange of {kind} failed: rank {peer} "
        f"died or fell silent, {left:,} bytes outstanding ({reason})"
    )


def count_bytes(rounds: Sequence[Round]) -> int:
    return sum(block.bytes.numel() for round_ in rounds for block in round_.blocks)


def cut(size: int, largest: int) -> list[int]:
    """Bytes of the pieces of a block, the same on both sides. Its first and last quarter are
    pieces, so that the stages begin and end soon after each other; what is between is cut less
    often: every copy takes some microseconds more than its bytes do."""
    quarter = -(-size // 4 // 4096) * 4096
    end = min(largest, max(quarter, 1 << 20))
    if size <= 2 * end:
        return [piece for piece in (min(size, end), size - end) if piece > 0]
    between = min(largest, 2 * end)
    whole, rest = divmod(size - 2 * end, between)
    return [end, *[between] * whole, *([rest] if rest else []), end]
