"""AllToAll with nothing beside it, and what of the copy engines' and the wire's speed hostwire
reaches.

All ranks copy or send at the same time; a time is the slowest rank's. Rates are bytes that leave a
rank, one way, per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from freescale.transport.hostwire.bindings import load_engine
from freescale_bench.overlap.arms import (
    Arm,
    Bed,
    closed,
    count_leaving,
    format_size,
    make_stream,
    to_gigabytes,
)
from freescale_bench.overlap.copies import WAYS, Copies


def measure_alone(bed: Bed) -> None:
    """NCCL has the better of it where it has NVLink, and of small messages: hostwire passes through
    the host."""
    for size in bed.size["alone"]:
        arms = [(bed.plain(), 1, ""), (bed.hostwire, 1, ""), (bed.hostwire, 2, ", two in flight")]
        for arm, flight, more in arms:
            _measure_sent(bed, "alone", arm, size, flight, more)


def measure_throughput(bed: Bed) -> None:
    """Plain pinned copies, hostwire's copies without a wire, whole hostwire: over shared memory,
    which copies nothing on the way, and over gloo and TCP; gloo's own AllToAll of host tensors is
    the wire's speed."""
    found = load_engine()
    ring = Copies(bed, found) if found is not None else None
    wires = [
        bed.wired(f"hostwire over {wire}", wire, shared=False)
        for wire in ("gloo", "tcp")
        if wire == "gloo" or ring
    ]
    for size in bed.size["throughput"]:
        bytes_ = count_leaving(size, bed.world)
        plain = {
            name: _measure_copies(bed, size, f"plain copies {name}", call)
            for name, call in _plain_copies(bed, bytes_).items()
        }
        if ring is not None:
            for way in WAYS:
                name, copy = f"hostwire's copies {way}", partial(ring.copy, way, size)
                _measure_copies(bed, size, name, copy, plain[way], "plain copies", end=ring.settle)
        both = plain["both ways"]
        for flight, more in ((1, ""), (2, ", two in flight")):
            _measure_sent(
                bed,
                "throughput",
                bed.hostwire,
                size,
                flight,
                more,
                bound=both,
                what="PCIe, both ways",
            )
        wire = _measure_wire(bed, size)
        slower = min((both, "PCIe, both ways"), (wire, "gloo"))
        for arm, (flight, more) in product(wires, ((1, ""), (2, ", two in flight"))):
            _measure_sent(
                bed, "throughput", arm, size, flight, more, bound=slower[0], what=slower[1]
            )
    if ring is not None:
        ring.close()
    for arm in wires:
        closed(arm)


def _measure_sent(
    bed: Bed,
    group: str,
    arm: Arm,
    size: int,
    flight: int,
    more: str,
    bound: float = 0.0,
    what: str = "",
) -> None:
    # A message of 16 MB takes 1.2 ms, more or less by 5 % from one repetition to the next; larger
    # ones differ less and take longer.
    often = bed.size["repetitions"]
    times = bed.message_times(arm, size, flight, 3 * often if size < 64 << 20 else often // 2)
    fields = {"flight": flight} | ({"piece": arm.piece} if arm.piece else {})
    _add(
        bed,
        group,
        f"AllToAll of {format_size(size)}",
        f"{arm.name}{more}",
        size,
        times,
        bound,
        what,
        **fields,
    )


def _add(
    bed: Bed,
    group: str,
    case: str,
    arm: str,
    size: int,
    times: list[float],
    bound: float,
    what: str,
    **fields: Any,
) -> dict[str, Any]:
    rate = to_gigabytes(count_leaving(size, bed.world), median(times))
    if bound:
        fields |= {"bound": what, "bound_rate": bound, "ceiling_percent": 100 * rate / bound}
    return bed.add(group, case, arm, bytes=size, ms=times, rate=rate, unit="GB/s", **fields)


# ---- copies


def _measure_copies(
    bed: Bed,
    size: int,
    arm: str,
    copy: Callable[[], object],
    bound: float = 0.0,
    what: str = "",
    case: str = "copies",
    end: Callable[[], object] = bool,
) -> float:
    """GB/s each way, of copies that follow each other, until `end`: so many that the ranks' start
    does not count."""
    count = max(1, bed.size["each"] // size)
    times = []
    for _ in range(bed.size["repetitions"] + 1):
        bed.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            copy()
        end()
        bed.idle()
        times.append(1e3 * (time.perf_counter() - begin) / count)
    row = _add(
        bed,
        "throughput",
        f"{case} of {format_size(size)}",
        arm,
        size,
        bed.slowest(times[1:]),
        bound,
        what,
    )
    return float(row["rate"])


def _plain_copies(bed: Bed, size: int) -> dict[str, Callable[[], None]]:
    """One copy of everything, between the device and pinned memory that torch gives."""
    there = [torch.zeros(size, dtype=torch.uint8, device=bed.device) for _ in WAYS]
    here = [torch.zeros(size, dtype=torch.uint8, pin_memory=bed.cuda) for _ in WAYS]
    streams = [make_stream(bed.device) if bed.cuda else None for _ in WAYS]
    pairs = {WAYS[0]: (here[0], there[0]), WAYS[1]: (there[1], here[1])}  # to, from
    bed.idle()

    def copying(*ways: str) -> Callable[[], None]:
        def copy() -> None:
            for way, stream in zip(ways, streams, strict=False):
                with torch.cuda.stream(stream):
                    pairs[way][0].copy_(pairs[way][1], non_blocking=True)

        return copy

    return {WAYS[0]: copying(WAYS[0]), WAYS[1]: copying(WAYS[1]), "both ways": copying(*WAYS)}


def _measure_wire(bed: Bed, size: int) -> float:
    """GB/s of gloo's own AllToAll between tensors of the host."""
    part = max(1, size // bed.world)
    tensor = torch.zeros(part * bed.world, dtype=torch.uint8)
    output = torch.empty_like(tensor)
    send = lambda: dist.all_to_all_single(output, tensor, group=bed.collective.control)  # noqa: E731
    return _measure_copies(bed, size, "gloo alone", send, case="AllToAll of host tensors")
