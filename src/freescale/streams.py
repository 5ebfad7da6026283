"""The current stream of a GPU, and events on it.

torch's own functions look up the device and the environment first. They are called hundreds of
times per step, by threads that compete for the interpreter with the one that launches kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# torch never gives a stream's number to another
_known: dict[tuple[int, int, int], torch.cuda.Stream] = {}
_stream: Any = torch.cuda.Stream  # torch does not annotate these
_event: Any = torch.cuda.Event


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """The current stream of `device`, or of the current device."""
    calls: Any = torch._C  # they are not in torch's stubs
    index = (
        device.index if device is not None and device.index is not None else calls._cuda_getDevice()
    )
    found = calls._cuda_getCurrentStream(index)  # number, index, type of the device
    stream = _known.get(found)
    if stream is None:
        number, index, kind = found
        stream = _known[found] = _stream(stream_id=number, device_index=index, device_type=kind)
    return stream


def record_event(stream: torch.cuda.Stream | None = None, **options: bool) -> torch.cuda.Event:
    """Records an event (`options` as of torch.cuda.Event) on a stream, by default the current
    one."""
    event: torch.cuda.Event = _event(**options)
    event.record(stream if stream is not None else current_stream())
    return event


def record_event_on(
    device: torch.device, stream: torch.cuda.Stream | None = None, **options: bool
) -> torch.cuda.Event | None:
    """As `record_event`, on `device`; None on a CPU, where nothing is asynchronous."""
    if device.type != "cuda":
        return None
    return record_event(stream if stream is not None else current_stream(device), **options)


def begin_reading(numbers: torch.Tensor) -> Callable[[], list[int]]:
    """Starts copying integers [n] to the host and returns a function that waits for them alone."""
    if not numbers.is_cuda:
        return numbers.tolist
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    copied = record_event(current_stream(numbers.device))

    def read() -> list[int]:
        copied.synchronize()
        found: list[int] = there.tolist()
        return found

    return read


def has_happened(event: torch.cuda.Event) -> bool:
    """Whether the device has reached the event. Does not wait."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A new stream. A negative `priority` runs before the default streams."""
    stream: torch.cuda.Stream = _stream(device, priority=priority)
    return stream


class InTurn:
    """Orders the work of several threads and streams on shared device tensors. The caller ensures
    that there is one call at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reached = record_event_on(device)  # the last work; None on a CPU
        self._stream = current_stream(device) if self._reached is not None else None  # its stream

    @contextmanager
    def __call__(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Runs the current stream after the last work. `tensors` may be from another stream."""
        if self._reached is None:
            yield
            return
        stream = current_stream(self._device)
        if stream is not self._stream:
            stream.wait_event(self._reached)
            self._stream = stream
        for tensor in tensors:
            tensor.record_stream(stream)
        try:
            yield
        finally:
            self._reached.record(stream)  # earlier waiters keep the previous point

    def wait(self) -> None:
        """Waits for the last work on the host."""
        if self._reached is not None:
            self._reached.synchronize()
