"""AllToAll with nothing beside it, and what of the copy engines' and the wire's speed hostwire reaches.

All ranks copy or send at the same time; a time is the slowest rank's. Rates are bytes that leave a rank, one way, per second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.bench.arms import SECONDS, Arm, Bed, closed, gigabytes, leaving, words
from freescale.transport.channel import Channel
from freescale.transport.gate import Gate
from freescale.transport.halves import SLOTS
from freescale.transport.memory import Pinned, shared_file
from freescale.transport.transfer import Part, Round, Transfer

WAYS = ("device to host", "host to device")


def alone(bed: Bed) -> None:
    """NCCL has the better of it where it has NVLink, and of small messages: hostwire passes through the host."""
    for size in bed.size["alone"]:
        arms = [(bed.plain(), 1, ""), (bed.hostwire, 1, ""), (bed.hostwire, 2, ", two in flight")]
        for arm, flight, more in arms:
            _sent(bed, "alone", arm, size, flight, more)


def throughput(bed: Bed) -> None:
    """Plain pinned copies, hostwire's copies without a wire, whole hostwire: over shared memory, which copies nothing on the way,
    and over gloo, whose own AllToAll of host tensors is the wire's speed."""
    ring = Ring(bed)
    gloo = bed.wired("hostwire over gloo", shared=False)
    for size in bed.size["throughput"]:
        bytes_ = leaving(size, bed.world)
        plain = {name: _copied(bed, size, f"plain copies {name}", call) for name, call in _plain_copies(bed, bytes_).items()}
        for way in WAYS:
            copies = partial(ring.copy, way, size, bed)
            _copied(bed, size, f"hostwire's copies {way}", copies, bound=plain[way], what="plain copies")
        both = plain["both ways"]
        for flight, more in ((1, ""), (2, ", two in flight")):
            _sent(bed, "throughput", bed.hostwire, size, flight, more, bound=both, what="PCIe, both ways")
        wire = _wire(bed, size)
        slower = min((both, "PCIe, both ways"), (wire, "gloo"))
        for flight, more in ((1, ""), (2, ", two in flight")):
            _sent(bed, "throughput", gloo, size, flight, more, bound=slower[0], what=slower[1])
    ring.close()
    closed(gloo)


def _sent(bed: Bed, group: str, arm: Arm, size: int, flight: int, more: str, bound: float = 0.0, what: str = "") -> None:
    times = bed.message_times(arm, size, flight, bed.size["repetitions"] if size < 64 << 20 else bed.size["repetitions"] // 2)
    fields = {"flight": flight} | ({"piece": arm.piece} if arm.piece else {})
    _add(bed, group, f"AllToAll of {words(size)}", f"{arm.name}{more}", size, times, bound, what, **fields)


def _add(
    bed: Bed, group: str, case: str, arm: str, size: int, times: list[float], bound: float, what: str, **fields: Any
) -> dict[str, Any]:
    rate = gigabytes(leaving(size, bed.world), median(times))
    if bound:
        fields |= {"bound": what, "bound_rate": bound, "ceiling_percent": 100 * rate / bound}
    return bed.add(group, case, arm, bytes=size, ms=times, rate=rate, unit="GB/s", **fields)


# ---- copies


def _copied(
    bed: Bed, size: int, arm: str, copy: Callable[[], None], bound: float = 0.0, what: str = "", case: str = "copies"
) -> float:
    """GB/s each way, of copies that follow each other: so many that the ranks' start does not count."""
    count = max(1, bed.size["each"] // size)
    times = []
    for _ in range(bed.size["repetitions"] + 1):
        bed.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            copy()
        bed.idle()
        times.append(1e3 * (time.perf_counter() - begin) / count)
    return _add(bed, "throughput", f"{case} of {words(size)}", arm, size, bed.slowest(times[1:]), bound, what)["rate"]


def _plain_copies(bed: Bed, size: int) -> dict[str, Callable[[], None]]:
    """One copy of everything, between the device and pinned memory that torch gives."""
    there = [torch.zeros(size, dtype=torch.uint8, device=bed.device) for _ in WAYS]
    here = [torch.zeros(size, dtype=torch.uint8, pin_memory=bed.cuda) for _ in WAYS]
    streams = [torch.cuda.Stream(bed.device) if bed.cuda else None for _ in WAYS]
    pairs = {WAYS[0]: (here[0], there[0]), WAYS[1]: (there[1], here[1])}  # to, from
    bed.idle()

    def copying(*ways: str) -> Callable[[], None]:
        def copy() -> None:
            for way, stream in zip(ways, streams, strict=False):
                with torch.cuda.stream(stream):
                    pairs[way][0].copy_(pairs[way][1], non_blocking=True)

        return copy

    return {WAYS[0]: copying(WAYS[0]), WAYS[1]: copying(WAYS[1]), "both ways": copying(*WAYS)}


class _Nothing:
    """A wire that carries nothing: what is sent has been read at once, and what is expected is there, in slots in turn."""

    path, direct = "nothing", False

    def __init__(self, memory: Tensor, slot: int) -> None:
        self._slots, self._taken = memory.split(slot), 0

    def send(self, peer: int, piece: Tensor) -> _There:
        return _There(piece)

    def expect(self, peer: int, size: int, into: Tensor | None) -> _There:
        self._taken += 1
        return _There(self._slots[self._taken % SLOTS][:size])

    def close(self) -> None:
        pass


class _There:
    def __init__(self, piece: Tensor) -> None:
        self._piece = piece

    def ready(self) -> bool:
        return True

    def wait(self, seconds: float) -> Tensor:
        return self._piece

    def free(self) -> None:
        pass


class Ring:
    """A channel of hostwire as it is, with slots in shared memory, over no wire: its copies alone."""

    def __init__(self, bed: Bed) -> None:
        piece = bed.hostwire.piece
        self._out, self._into = (_shared(SLOTS * piece, bed.device) for _ in WAYS)
        wire = _Nothing(self._into.bytes, piece)
        self._channel = Channel(
            "ring", bed.rank, bed.device, [wire] * bed.world, self._out, Gate(0.001), piece, SECONDS, patient=True
        )
        self._tensors: dict[int, Tensor] = {}

    def copy(self, way: str, size: int, bed: Bed) -> None:
        """What an AllToAll of `size` copies one way; it has been copied when this returns."""
        part = max(1, size // bed.world)
        if size not in self._tensors:
            self._tensors[size] = torch.zeros(part * (bed.world - 1), dtype=torch.uint8, device=bed.device)
            bed.idle()
        peers = [peer for peer in range(bed.world) if peer != bed.rank]
        parts = Round([Part(peer, some) for peer, some in zip(peers, self._tensors[size].split(part), strict=True)])
        out, into = ([parts], []) if way == WAYS[0] else ([], [parts])
        transfer = Transfer("rows", out, into, False, bed.device)
        self._channel.submit(transfer)
        transfer.wait()
        if transfer.arrived is not None:
            transfer.arrived.synchronize()

    def close(self) -> None:
        self._channel.close()
        for memory in (self._out, self._into):
            memory.close()


def _shared(size: int, device: torch.device) -> Pinned:
    file = shared_file(size)
    try:
        return Pinned(size, device, file)
    finally:
        os.close(file)


def _wire(bed: Bed, size: int) -> float:
    """GB/s of gloo's own AllToAll between tensors of the host."""
    part = max(1, size // bed.world)
    tensor = torch.zeros(part * bed.world, dtype=torch.uint8)
    output = torch.empty_like(tensor)
    send = lambda: dist.all_to_all_single(output, tensor, group=bed.collective.control)  # noqa: E731
    return _copied(bed, size, "gloo alone", send, case="AllToAll of host tensors")
