"""Copies of a run's state in host memory, all of one moment, while training goes on.

If a GPU has room, its state is copied at once within its memory, and from there by the thread that
writes it, in pieces, during the following steps: no step waits for the bus, other traffic for one
piece at most. Without room the pieces cross the bus at once, on the caller's stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, _utils

from freescale.embedding.lease import Capture
from freescale.embedding.tables import Tables
from freescale.streams import new_stream, record_event
from freescale.transport.event_waits import wait_for_event
from freescale.transport.failures import describe_error
from freescale.transport.shared_gpu import count_sharing
from freescale.transport.threads import start_thread

T = TypeVar("T")

# Bytes of a piece: a GPU's copy engine ends one copy before it begins another, and this one takes
# about 160 us of the bus. Smaller ones take the interpreter from the step more often.
_PIECE = 8 << 20
_SMALL = 16 << 20  # bytes of a tensor that is copied together with others
_TOGETHER = 64 << 20  # bytes of these, at most: torch rounds up pinned memory to powers of two
_flatten: Any = _utils._flatten_dense_tensors  # torch does not annotate these
_unflatten: Any = _utils._unflatten_dense_tensors
# By device: the most bytes that copies of one moment have used. torch keeps them for the next.
_used_before: dict[torch.device, int] = {}


class StateCopies:
    """`copy` and `seal` on the threads and streams that have the state; then `finish`, on any.
    `room`: bytes of the device that copies may use; None: as before, and what `find_room` finds."""

    def __init__(self, device: torch.device, room: int | None = None) -> None:
        self._device = device
        # Memory of earlier copies is reused: asking the driver for more is slow.
        self._room = _used_before.get(device, 0) if room is None else room
        self._may_grow = room is None and device.type == "cuda"
        self._used = 0  # of the room
        self._kept: list[tuple[Tensor, Tensor]] = []  # (in host memory, what it will hold)
        self._events: list[torch.cuda.Event] = []

    def copy(self, value: Tensor, *, is_copy: bool = False) -> Tensor:
        """A copy in host memory, pinned if `value` is on a GPU: it has the value, as on the current
        stream now, after `finish`. `is_copy`: it is a copy already, and nobody changes it."""
        if _is_on_host(value):
            return value if is_copy else value.clone()
        value = value.detach()
        copied = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        kept = value.contiguous() if is_copy else self._keep(value)
        if kept is None:
            for to, piece in cut_alike(copied, value.contiguous(), _PIECE):
                to.copy_(piece, non_blocking=True)
        else:
            self._kept.append((copied, kept))
        return copied

    def copy_all(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `copy`, of many. Small ones on a GPU of one dtype are copied together: each by itself
        takes about 50 us of the caller, and more of the thread that writes it."""
        together: dict[str, Tensor] = {}
        for names in _group_alike(values):
            copied = self._copy_together([values[name] for name in names])
            together |= zip(names, copied, strict=True)
        return {
            name: together[name] if name in together else self.copy(value)
            for name, value in values.items()
        }

    def _copy_together(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Views of one copy of tensors that are contiguous and alike."""
        size = sum(value.nbytes for value in values)
        if len(values) == 1 or not self._has_room(size):
            return [self.copy(value) for value in values]
        self._use(size)
        # Made for gradients; a Python view of each would take longer than everything else.
        with torch.no_grad():
            flat = self.copy(_flatten(values), is_copy=True)
        return list(_unflatten(flat, values))

    def seal(self) -> None:
        """Ends the copies of the current stream since the last call."""
        if self._device.type == "cuda":
            self._events.append(record_event(blocking=True))

    def finish(self) -> None:
        """Waits until the copies have their values, and fetches what is on the device."""
        for event in self._events:
            wait_for_event(event)
        self._events = []
        if not self._kept:
            return
        stream = new_stream(self._device)
        with torch.cuda.stream(stream):
            while self._kept:
                copied, kept = self._kept.pop(0)
                for to, piece in cut_alike(copied, kept, _PIECE):
                    to.copy_(piece, non_blocking=True)
                    # one piece in flight: copies of others get their turn between two
                    record_event(blocking=True).synchronize()

    def _keep(self, value: Tensor) -> Tensor | None:
        """A copy on the device, or None if there is no room."""
        if not self._has_room(value.nbytes):
            return None
        try:
            kept = value.clone(memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:  # the room is used by something else now
            self._room, self._may_grow = 0, False
            return None
        self._use(value.nbytes)
        return kept

    def _has_room(self, size: int) -> bool:
        if self._used + size > self._room and self._may_grow:
            self._room, self._may_grow = self._used + find_room(self._device), False
        return self._used + size <= self._room

    def _use(self, size: int) -> None:
        self._used += size
        _used_before[self._device] = max(self._used, _used_before.get(self._device, 0))


def _group_alike(values: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of those that can be copied together."""
    groups: list[list[str]] = []
    last: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for name, value in values.items():
        if _is_on_host(value) or not value.is_contiguous() or value.nbytes > _SMALL:
            continue
        kind = value.device, value.dtype
        if kind not in last or sizes[kind] + value.nbytes > _TOGETHER:
            last[kind], sizes[kind] = [], 0
            groups.append(last[kind])
        last[kind].append(name)
        sizes[kind] += value.nbytes
    return groups


def find_room(device: torch.device) -> int:
    """Bytes of a GPU that copies may use for a while, in addition to what they have: half of this
    rank's share of the free memory. What torch holds is for the next step."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free // count_sharing() // 2


def _is_on_host(value: Tensor) -> bool:  # tests take the host for a GPU
    return value.is_cpu


def cut_alike(copied: Tensor, value: Tensor, most: int) -> list[tuple[Tensor, Tensor]]:
    """Both, contiguous and alike, in pieces of `most` bytes."""
    size = max(1, most // value.element_size())
    pieces = (torch.split(each.detach().view(-1), size) for each in (copied, value))
    return list(zip(*pieces, strict=True))


# ---- what is saved while training goes on


class Job:
    """Saving a state in the background: parts of it run on the training thread, the rest on a
    thread of its own. Knows what it has cost."""

    def __init__(self, device: torch.device) -> None:
        self.copies = StateCopies(device)  # of what is saved
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.seconds = 0.0  # from the beginning to the end
        self.processor = 0.0  # seconds that threads have computed for it
        self._begin = time.perf_counter()

    def run(self, work: Callable[[], T]) -> T:
        """Runs a part of it, on the caller's thread."""
        begin = time.thread_time()
        try:
            return work()
        finally:
            self.processor += time.thread_time() - begin

    def copy(
        self, tables: Tables, collect: Callable[[], None], add_sharded: Callable[[], None]
    ) -> Callable[[], None]:
        """Collects a state: at once, then the rows of sharded tables when they are those of this
        step. Returns a function that waits for the copies; it raises what went wrong."""
        try:
            self.run(collect)
        except (OSError, ValueError) as error:
            failure = error  # raised on all ranks, by whoever waits
            return lambda: _raise(failure)
        capture = Capture(lambda: self.run(add_sharded))
        tables.lease.capture(capture)

        def wait() -> None:
            try:
                capture.wait()
                self.copies.finish()
            except Exception as error:
                raise ValueError(
                    f"rows could not be copied into host memory: {describe_error(error)}"
                ) from error

        return wait

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Runs `work` on a thread. What is half written when the process ends is not a state."""

        def run() -> None:
            try:
                self.run(work)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                self.error = error
            self.seconds = time.perf_counter() - self._begin
            self.done.set()

        start_thread(name, run, lambda: None)

    def wait(self) -> None:
        """Waits for its end and raises its error."""
        self.done.wait()
        if self.error is not None:
            raise self.error


def _raise(error: Exception) -> None:
    raise error
