"""How busy a run keeps its GPU: a few steps of rank 0 under torch's profiler, once the run has
warmed up. On CPUs nothing is profiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from freescale.pipeline.step_result import StepResult
from freescale.train.callbacks import Callback, RunView
from freescale.train.metrics_log import append_metrics

_WARM_UP = 20  # steps before the profile, if the run has as many


def watch_compilations() -> Callable[[], list[str]]:
    """Returns a function that lists the kernels compiled since this call, as `describe_source`
    writes them. Kernels loaded from the cache on disk do not count."""
    try:
        from triton import knobs
    except ImportError:
        return list
    compiled: list[str] = []
    before = knobs.compilation.listener

    def note(*, cache_hit: bool = False, src: Any = None, **about: Any) -> None:
        if not cache_hit:
            compiled.append(describe_source(src))
        if before is not None:  # several may watch
            before(cache_hit=cache_hit, src=src, **about)

    knobs.compilation.listener = note
    return lambda: list(compiled)


def describe_source(source: Any) -> str:
    """A kernel with everything that selects this version of it, as in `copy_kernel(x: *fp32 / 16,
    n: i32, BLOCK=1024)`. "/ 16": the argument is known to be a multiple of 16."""
    constants = getattr(source, "constants", {})
    attributes = getattr(source, "attrs", {})
    words = []
    for number, (name, kind) in enumerate(getattr(source, "signature", {}).items()):
        if (number,) in constants:
            words.append(f"{name}={constants[(number,)]}")
        else:
            known = any(what == "tt.divisibility" for what, _ in attributes.get((number,), ()))
            words.append(f"{name}: {kind}{' / 16' if known else ''}")
    return f"{getattr(source, 'name', source)}({', '.join(words)})"


def choose_first_step(done: int, total: int, steps: int) -> int | None:
    """The step after which `steps` steps are profiled; None if the run is too short.

    Args:
        done: steps before a resumption.
        total: steps that the run ends with.
        steps: steps to profile.
    """
    left = total - done
    return done + min(_WARM_UP, left - steps) if steps and left > steps else None


class DeviceFigures(Callback):
    """Adds a line to metrics.jsonl: `device_busy`, the share of time in which the GPU ran a kernel
    or a copy (0 to 1), `launches` of kernels a step, and `compilations` of Triton kernels between
    the first step and the profile; `compiled` names these, if any."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: int | None = None
        self._profiler: torch.profiler.profile | None = None
        self._begin = 0.0
        self._list_compiled: Callable[[], list[str]] | None = None

    def on_start(self, trainer: RunView) -> None:
        if trainer.rank == 0 and trainer.transport.device.type == "cuda":
            self._first = choose_first_step(trainer.step, trainer.total, self._steps)

    def on_step(self, trainer: RunView, step: StepResult) -> None:
        if self._first is None:
            return
        if self._list_compiled is None:  # the first step compiles what is needed
            self._list_compiled = watch_compilations()
        if step.step == self._first:
            self._start()
        elif step.step == self._first + self._steps and self._profiler is not None:
            append_metrics(trainer.folder, {"step": step.step, **self._stop()})

    def _start(self) -> None:
        try:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            torch.cuda.synchronize()
            profiler.start()
        except RuntimeError:  # the program profiles itself
            return
        self._profiler, self._begin = profiler, time.perf_counter()

    def _stop(self) -> dict[str, Any]:
        assert self._profiler is not None and self._list_compiled is not None
        torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - self._begin)
        self._profiler.stop()
        work, self._profiler = list_work(self._profiler), None
        busy = measure_union((begin, begin + duration) for _, begin, duration in work)
        compiled = self._list_compiled()
        return {
            "device_busy": min(1.0, busy / wall),
            "launches": sum(not is_copy(name) for name, *_ in work) / self._steps,
            "compilations": len(compiled),
            **({"compiled": compiled} if compiled else {}),
        }


def measure_union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of [begin, end) intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


def list_work(profiler: torch.profiler.profile) -> list[tuple[str, float, float]]:
    """The kernels and copies of a finished profile: name, begin and duration in milliseconds."""
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    # labels of ranges are no work of the device
    labels = ("freescale/", "Optimizer.", "Activity Buffer", "ProfilerStep")
    return [
        (event.name(), event.start_ns() / 1e6, event.duration_ns() / 1e6)
        for event in kineto.kineto_results.events()
        if str(event.device_type()).endswith("CUDA") and event.duration_ns() > 0
        if not event.name().startswith(labels)
    ]


def is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))
