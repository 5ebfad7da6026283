"""Memory files are read by several threads, in pieces."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from freescale.kernels.checksums.native import as_bytes, cut_short
from freescale.packed import view_bytes
from freescale.streams import record_event
from freescale.worker_server import count_cores

_PIECE = 4 << 20  # bytes that a thread reads at once
_PIECES = 2  # of each thread
_MOST_THREADS = 8


class FileReads:
    """The reads of one restore; `close` ends its threads: one alone does not get the memory's
    speed. What goes to a GPU goes through few pinned pieces, two of each thread: one is on the bus
    while the thread fills the other."""

    def __init__(self) -> None:
        self.threads = min(_MOST_THREADS, count_cores())  # nothing else runs
        self._pool = ThreadPoolExecutor(self.threads, "restore")
        self._pinned: list[Tensor] = []  # the pieces of each thread
        self._sent: dict[tuple[int, int], torch.cuda.Event] = {}  # by (thread, piece)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, file: int, place: int, to: Tensor) -> None:
        """Fills a tensor from `place` on; a GPU's stream may still be copying when this returns."""
        data = view_bytes(to)
        if to.device.type == "cuda":
            self.read_in_pieces(file, place, data)
        else:
            self._divide(data.numel(), lambda _, at, end: _fill(file, place + at, data[at:end]))

    def read_in_pieces(self, file: int, place: int, data: Tensor) -> None:
        """Reads bytes into a GPU's memory."""
        on_gpu = data.device.type == "cuda"
        if not self._pinned:
            size = (self.threads, _PIECES, _PIECE)
            self._pinned = list(torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu))
        stream = torch.cuda.current_stream(data.device) if on_gpu else None

        def send(thread: int, begin: int, end: int) -> None:
            for number, at in enumerate(range(begin, end, _PIECE)):
                turn = number % _PIECES
                if (thread, turn) in self._sent:
                    self._sent.pop((thread, turn)).synchronize()
                piece = self._pinned[thread][turn][: min(_PIECE, end - at)]
                _fill(file, place + at, piece)
                with torch.cuda.stream(stream):
                    data[at : at + piece.numel()].copy_(piece, non_blocking=True)
                    if on_gpu:
                        self._sent[thread, turn] = record_event()

        self._divide(data.numel(), send)

    def _divide(self, size: int, work: Callable[[int, int, int], None]) -> None:
        """Runs work(thread, begin, end) on each thread, with its part of `size` bytes."""
        each = max(1, -(-size // self.threads // _PIECE)) * _PIECE
        running = [
            self._pool.submit(work, thread, begin, min(begin + each, size))
            for thread, begin in enumerate(range(0, size, each))
        ]
        for part in running:
            part.result()


def _fill(file: int, place: int, room: Tensor) -> None:
    """Reads bytes of a file from `place` on. OSError if it ends before."""
    left = as_bytes(room).data
    while left:
        count = os.preadv(file, [left], place)
        if not count:
            raise cut_short(place)
        left, place = left[count:], place + count
