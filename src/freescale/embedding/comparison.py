"""Two consecutive requests of one group of tables, divided by the rows that both batches read.

The owner of a row sees the requests of all ranks and marks what the two batches share; one AllToAll
tells the requesters (kind: ids). Both ends then divide both requests in the same way: first the
part with the marked rows, then pieces of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from freescale.embedding.collision import MarkedRows, Masks, divide_rows
from freescale.embedding.request import Requested, RequestPart, split_request
from freescale.streams import begin_reading
from freescale.transport.api import Transport

FindLocal = Callable[[Tensor], Tensor]


class ComparedRequest:
    """One of the two requests, with the marks of its rows that the other one reads too."""

    def __init__(self, request: Requested, marks: Tensor) -> None:
        """marks [sum(receive)] bool: of the rows that are requested from this rank."""
        self.request, self._served_marks = request, marks
        self._requested_marks: Tensor | None = None

    def split_marks(self) -> tuple[Tensor, ...]:
        """The marks for each requester."""
        return torch.split(self._served_marks, self.request.whole.receive)

    def adopt_marks(self, marks: tuple[Tensor, ...]) -> None:
        """marks: from each owner, of the rows that this rank requests."""
        self._requested_marks = torch.cat(marks)

    def list_rows(self, find_local: FindLocal) -> list[MarkedRows]:
        """What is to be divided: the rows that this rank requests, and those that it serves."""
        request, marks = self.request, self._requested_marks
        assert marks is not None
        # of one piece are all rows, whatever their numbers
        local = find_local(request.index.keys) if request.pieces > 1 else request.index.keys
        return [
            MarkedRows(marks, local, request.whole.send, request.pieces),
            MarkedRows(self._served_marks, request.owned, request.whole.receive, request.pieces),
        ]

    def split(
        self, positions: Iterator[Tensor], counts: Iterator[int], ranks: int
    ) -> list[RequestPart]:
        """The part with the marked rows, then the pieces of the others. Takes from `positions` and
        `counts` what `divide_rows` found for its two lists of rows."""
        bins = (1 + self.request.pieces) * ranks
        requested, served = next(positions), next(positions)
        send, receive = ([next(counts) for _ in range(bins)] for _ in range(2))
        return split_request(requested, send, served, receive, ranks)


def compare_requests(
    current: Requested,
    following: Requested,
    find_local: FindLocal,
    transport: Transport,
    masks: Masks,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[list[RequestPart], list[RequestPart]]:
    """Divides the requests of two consecutive batches by the rows that they share. On the caller's
    thread and stream.

    `masks` finds the shared rows, on their owner. `find_local` makes local rows of keys.
    `meanwhile` is called while a GPU divides them, once what travels has arrived. Returns the parts
    of both requests: the first part of each has the shared rows, the others are pieces of the rest.
    """
    with transport.ledger.span("compare"):
        found = masks(current.owned, following.owned)
        sides = ComparedRequest(current, found[0]), ComparedRequest(following, found[1])
        # One message to each requester: marks of its current request, then of the following one.
        pairs = zip(sides[0].split_marks(), sides[1].split_marks(), strict=True)
        marks = torch.cat([part for pair in pairs for part in pair]).view(torch.uint8)
        send = _add_sizes(current.whole.receive, following.whole.receive)
        receive = _add_sizes(current.whole.send, following.whole.send)
    answer = transport.all_to_all(marks, send, receive, "ids").wait().view(torch.bool)
    with transport.ledger.span("compare"):
        sizes = zip(current.whole.send, following.whole.send, strict=True)
        by_owner = torch.split(answer, [size for pair in sizes for size in pair])
        for place, side in enumerate(sides):
            side.adopt_marks(by_owner[place::2])
        lists = [rows for side in sides for rows in side.list_rows(find_local)]
        positions, counts = divide_rows(lists)
        read_sizes = begin_reading(counts)  # one trip to the host for all split sizes
    meanwhile()
    with transport.ledger.span("compare"):
        by_list, numbers = iter(positions), iter(read_sizes())
        first, second = (side.split(by_list, numbers, transport.world) for side in sides)
        return first, second


def _add_sizes(first: list[int], second: list[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]
