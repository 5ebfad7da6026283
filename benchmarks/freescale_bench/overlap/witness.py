"""Witness that hostwire uses no multiprocessor: a kernel holds all of them, and hostwire's AllToAll
still arrives. NCCL's, the control, has to wait for the kernel's end.

Ranks send nothing to themselves: a copy on the device is a kernel.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from freescale_bench.kernels.measure import make_events
from freescale_bench.overlap.arms import Arm, Bed, count_leaving, format_size, make_stream

MILLISECONDS = 400  # for which the kernel holds the device
_WARPS = 32  # 1,024 threads: two programs fill a multiprocessor
_PER_PROCESSOR = 4  # programs: more than fit, whatever the rank's part of the device
_STREAMS = 3


def measure_witness(bed: Bed) -> None:
    case = (
        f"AllToAll of {format_size(bed.size['message'])} while a kernel holds every multiprocessor"
    )
    if not bed.cuda:
        bed.add("witness", case, "hostwire", skipped="needs a GPU")
        return
    # Streams outnumber the device's queues. If the kernel shares a queue with the lane, the attempt
    # proves nothing: try another stream.
    for number in range(_STREAMS):
        stream = make_stream(bed.device) if number else torch.cuda.default_stream(bed.device)
        found = _measure_held(bed, bed.hostwire, stream)
        if found["arrived_meanwhile"]:
            break
    bed.add("witness", case, bed.hostwire.name, **found, streams_tried=number + 1)
    control = bed.plain()
    bed.add("witness", case, control.name, **_measure_held(bed, control, stream))


def _measure_held(bed: Bed, arm: Arm, stream: torch.cuda.Stream) -> dict[str, Any]:
    """Runs an AllToAll by `arm` while the kernel runs on `stream`."""
    part = max(1, bed.size["message"] // bed.world)
    sizes = [0 if peer == bed.rank else part for peer in range(bed.world)]
    tensor = torch.full((sum(sizes),), bed.rank + 1, dtype=torch.uint8, device=bed.device)
    end = torch.zeros(1, dtype=torch.int64, device=bed.device)
    held = make_events()
    found: dict[str, Any] = {}

    def carry() -> None:
        found.clear()  # frees the previous result
        begin = time.perf_counter()
        found["result"] = arm.begin(tensor, sizes, sizes)(True)
        found["ms"] = 1e3 * (time.perf_counter() - begin)
        found["meanwhile"] = not held[1].query()  # type: ignore[no-untyped-call]

    # Compile and load kernels and allocate memory now: later it would wait for the kernel's end.
    bed.idle()
    _hold(end, stream, held, 1)
    bed.idle()
    for _ in range(2):
        bed.in_lane(arm, carry)
    end.zero_()
    bed.idle()
    bed.barrier()
    _hold(end, stream, held, MILLISECONDS)
    held[0].synchronize()  # the kernel starts next
    bed.barrier()  # kernels run on every rank: no part of the device is free
    bed.in_lane(arm, carry)
    ranks = bed.gathered(
        [
            found["meanwhile"],
            _as_sent(found["result"], sizes),
            found["ms"],
            held[0].elapsed_time(held[1]),
        ]
    )
    return {
        "ms": [max(rank[2] for rank in ranks)],
        "kernel_ms": min(rank[3] for rank in ranks),
        "arrived_meanwhile": all(rank[0] for rank in ranks),
        "arrived_after_it": not any(rank[0] for rank in ranks),
        "right": all(rank[1] for rank in ranks),
        "bytes": count_leaving(bed.size["message"], bed.world),
    }


def _hold(
    end: Tensor, stream: torch.cuda.Stream, held: list[torch.cuda.Event], milliseconds: int
) -> None:
    """Starts the kernel between two events."""
    from freescale_bench.overlap.busy_kernels import busy_kernel

    programs = _PER_PROCESSOR * torch.cuda.get_device_properties(end.device).multi_processor_count
    with torch.cuda.stream(stream):
        held[0].record()
        busy_kernel[(programs,)](end, milliseconds * 1_000_000, num_warps=_WARPS)
        held[1].record()


def _as_sent(result: Tensor, sizes: list[int]) -> bool:
    """Whether each part has its sender's number."""
    wanted = torch.cat(
        [torch.full((size,), rank + 1, dtype=result.dtype) for rank, size in enumerate(sizes)]
    )
    return bool(torch.equal(result.cpu(), wanted))
