"""Compute during communication: how long the kernels of a rank take alone, during NCCL's AllToAlls,
and during hostwire's.

A measurement is compute of about 30 ms on one stream, and as many back-to-back AllToAlls of 32 MB
as fit on a lane's stream. Hostwire carries at most as many as NCCL, and in another arm as many as
it can. The compute is one CUDA graph behind a pause, and messages start once it is queued. This
measures what kernels lose to traffic on the device, not what launches lose to the lane's threads.
Arms take turns, each between two measurements of the same compute alone, because a busy device
warms up and slows down. The slow-down is the median ratio to the mean of these two. The arm `alone`
is measured in the same way: its slow-down is the noise. Times are means over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean, median

import torch

from freescale.kernels.dispatch.attention import plan_attention
from freescale.pipeline.lane import Job
from freescale_bench.kernels.layers import make_layer_step
from freescale_bench.kernels.measure import make_events
from freescale_bench.overlap.arms import Arm, Bed, count_leaving, send_stream, to_gigabytes

_CYCLES = 2_000_000  # of a pause of one millisecond
FULL = "hostwire, as fast as it goes"
Compute = Callable[[], None]


def measure_products(bed: Bed) -> None:
    n, count = bed.size["product"], bed.size["products"]
    dtype = torch.bfloat16 if bed.cuda else torch.float32
    left, right = (torch.randn(n, n, device=bed.device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def compute() -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    _measure_case(bed, "products", f"{count} products of {n:,}^3", compute, repeat=1)


def measure_layers(bed: Bed) -> None:
    """Measures one HSTU layer, forward and backward, at a constant number of tokens."""
    for case, step in _layer_cases(bed):
        _measure_case(bed, "layer", case, step)


def _layer_cases(bed: Bed) -> Iterator[tuple[str, Compute]]:
    tokens, head = bed.size["tokens"], bed.size["head"]
    for width in bed.size["widths"]:
        for length in bed.size["lengths"]:
            lengths = torch.full((tokens // length,), length, device=bed.device)
            heads = width // head
            dtype = torch.bfloat16 if bed.cuda else torch.float32
            plan = plan_attention(lengths, heads, widths=(head, head), dtype=dtype)
            yield (
                f"HSTU layer, {width} wide, samples of {length:,}",
                make_layer_step(lengths, plan, width, heads, length),
            )


def _measure_case(bed: Bed, group: str, case: str, once: Compute, repeat: int = 0) -> None:
    """Adds the rows of all arms. `repeat`: calls per measurement; 0: as many as fill it."""
    for _ in range(3):
        once()  # loads kernels, allocates memory
    bed.idle()
    if not repeat:
        took = max(bed.gathered(median(_time(bed, once, 0.0) for _ in range(3))))
        repeat = max(1, round(bed.size["measured_ms"] / took))

    compute = _together(bed, once, repeat)
    pause = _find_pause(bed, compute)
    alone = max(bed.gathered(_time(bed, compute, pause)))
    loads = _make_loads(bed, alone)
    found: dict[str, list[tuple[float, float, float]]] = {load.name: [] for load in loads}
    before = _time(bed, compute, pause)
    for _ in range(bed.size["pairs"] + 1):
        for load in loads:
            took, carried = _measure_overlapped(bed, compute, pause, load)
            after = _time(bed, compute, pause)
            found[load.name].append((took, carried, (before + after) / 2))
            before = after
    counts = {load.name: load.messages for load in loads}
    for name, measured in found.items():
        everyone = bed.gathered(measured[1:])  # the first is a warm-up
        repetitions = range(len(measured) - 1)
        times, alone = (
            [mean(rank[number][which] for rank in everyone) for number in repetitions]
            for which in (0, 2)
        )
        longer = 100 * (median(time / other for time, other in zip(times, alone, strict=True)) - 1)
        shared = {
            "ms": times,
            "ranks_ms": [median(own for own, *_ in rank) for rank in everyone],
            "repeat": repeat,
        }
        if name == "alone":
            bed.add(group, case, name, **shared, noise_percent=longer)
            continue
        carried = median(max(rank[number][1] for rank in everyone) for number in repetitions)
        bytes_ = counts[name] * count_leaving(bed.size["message"], bed.world)
        bed.add(
            group, case, name, **shared, alone_ms=median(alone), slower_percent=longer,
            messages=counts[name], messages_ms=carried, rate=to_gigabytes(bytes_, carried),
            unit="GB/s",
        )  # fmt: skip


def _together(bed: Bed, once: Compute, repeat: int) -> Compute:
    """Captures `repeat` calls in one graph. Launched one by one, the kernels of a narrow layer
    would wait for their launches."""

    def compute() -> None:
        for _ in range(repeat):
            once()

    if not bed.cuda:
        return compute
    bed.idle()
    graph = torch.cuda.CUDAGraph()
    # lanes have their own threads
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        compute()
    bed.idle()
    return graph.replay


@dataclass(frozen=True)
class Load:
    """The communication during the compute."""

    name: str
    arm: Arm | None = None
    messages: int = 0


def _make_loads(bed: Bed, alone: float) -> list[Load]:
    def fits(arm: Arm) -> int:
        return max(1, int(alone / bed.message_ms(arm)))

    plain = [
        Load(arm.name, arm, fits(arm))
        for arm in (bed.plain(channels) for channels in bed.size["channels"])
    ]
    same = min(fits(bed.hostwire), max(load.messages for load in plain))
    return [
        Load("alone"),
        Load("hostwire", bed.hostwire, same),
        Load(FULL, bed.hostwire, fits(bed.hostwire)),
        *plain,
    ]


def _find_pause(bed: Bed, compute: Compute) -> float:
    """Milliseconds of a launch, with a margin. The same on all ranks."""
    bed.idle()
    begin = time.perf_counter()
    compute()
    took = 1e3 * (time.perf_counter() - begin)
    bed.idle()
    return 1.2 * max(bed.gathered(took)) + 1.0 if bed.cuda else 0.0


def _measure_overlapped(
    bed: Bed, compute: Compute, pause: float, load: Load
) -> tuple[float, float]:
    """Milliseconds of the compute, and of the concurrent messages."""
    arm = load.arm
    if arm is None:
        return _time(bed, compute, pause), 0.0
    carried: list[float] = []
    jobs: list[Job] = []

    def carry() -> None:
        begin = time.perf_counter()
        send_stream(arm, *bed.message, load.messages, arm.flight, host=False)
        carried.append(1e3 * (time.perf_counter() - begin))

    took = _time(bed, compute, pause, lambda: jobs.append(arm.lane.submit(carry)))
    jobs[0].wait(host=True)
    arm.lane.side.take()
    bed.idle()
    return took, carried[0]


def _time(
    bed: Bed, compute: Compute, pause: float, start: Callable[[], None] = lambda: None
) -> float:
    """Milliseconds of the compute on its stream; `start` is called once all of it is queued. Ranks
    start together."""
    bed.barrier()
    if not bed.cuda:
        start()
        begin = time.perf_counter()
        compute()
        return 1e3 * (time.perf_counter() - begin)
    first, last = make_events(blocking=True)
    torch.cuda._sleep(int(pause * _CYCLES))  # type: ignore[no-untyped-call]
    first.record()
    compute()
    last.record()
    with torch.cuda.stream(bed.elsewhere):  # see `in_lane`
        start()
    last.synchronize()
    return float(first.elapsed_time(last))
