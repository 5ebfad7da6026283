"""Which rows two consecutive batches share, and how requests are divided by it.

A row of batch i+1 that batch i reads too must wait for i's update (it collides). A row of batch i
that batch i+1 reads too must be updated first (it is shared). Whether a row is one or the other is
the same for every rank that requests it.

The owner of a row sees the requests of all ranks and marks what the two batches share; one AllToAll
tells the requesters (kind: ids). Both ends then divide both requests in the same way: first the
part with the marked rows, then pieces of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.request import Relay, Requested, RequestPart, split_request
from freescale.kernels.dispatch.requests import collision_masks, tag_rows
from freescale.kernels.requests.native import divide, fits_division
from freescale.kernels.requests.reference import MarkedRows, group_by_tag
from freescale.streams import begin_reading
from freescale.transport.api import Transport

# (rows that the current batch requests, that the following one requests) -> (which of the current
# ones are shared, which of the following ones collide)
Masks = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

FindLocal = Callable[[Tensor], Tensor]

__all__ = [
    "MarkedRows", "Masks", "collision_masks", "compare_requests", "count_pieces", "divide_rows",
    "is_few",
]  # fmt: skip

# Bulk traffic travels in pieces, so that the buffers of both ends stay small compared to the batch.
# Smallest size of a piece: an AllToAll of less is all latency. On a GPU that is mostly the host's:
# a piece takes a millisecond or two of a lane, which shares the interpreter with the compute.
_LEAST_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}
# Smallest share of a piece for one rank: with thousands of ranks, less is all latency.
_LEAST_MESSAGE = 16 << 10
_MOST_PIECES = 64


def count_pieces(bytes_per_rank: int, device: torch.device, ranks: int = 1) -> int:
    """Into how many pieces bulk traffic is cut: a power of two, by a mean over the ranks."""
    least = max(_LEAST_BYTES[device.type], _LEAST_MESSAGE * ranks)
    wanted = min(_MOST_PIECES, bytes_per_rank // least)
    return 1 << max(0, int(wanted).bit_length() - 1)


def is_few(bytes_per_rank: int, device: torch.device, nearby: bool) -> bool:
    """Whether the rows of a batch are so few that all may wait for the update of the batch before:
    within a machine, to find and divide what need not wait takes longer than to send it. On a GPU
    the next forward would wait, which takes longer still."""
    return nearby and device.type == "cpu" and bytes_per_rank < _LEAST_BYTES["cpu"]


def divide_rows(lists: Sequence[MarkedRows]) -> tuple[list[Tensor], Tensor]:
    """Divides each list into the marked rows and pieces of the others. A row is always in the same
    piece, whoever requests it. Returns positions [n] of each list, and counts [sum of bins] of all
    lists: first the marked rows, then the others piece by piece, each of these rank by rank, in
    their order. A list has (1 + pieces) * ranks counts."""
    if not all(fits_division(one.rows) for one in lists):
        return _divide_by_one_sort(lists)
    found = [divide(one.marked, one.rows, one.sizes, one.pieces) for one in lists]
    return [places for places, _ in found], torch.cat([counts for _, counts in found])


def _divide_by_one_sort(lists: Sequence[MarkedRows]) -> tuple[list[Tensor], Tensor]:
    """`divide_rows` of all lists at once, without C: on a GPU every kernel waits for its turn."""
    sizes = [one.rows.numel() for one in lists]
    order, found = group_by_tag(tag_rows(lists), sum(one.bins for one in lists))
    starts = np.cumsum([0] + sizes[:-1])
    parts = zip(torch.split(order, sizes), starts, strict=True)
    return [part - int(start) if start else part for part, start in parts], found


def compare_requests(
    current: Requested,
    following: Requested,
    find_local: FindLocal,
    transport: Transport,
    masks: Masks,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[list[RequestPart], list[RequestPart]]:
    """Divides the requests of two consecutive batches by the rows that they share. On the caller's
    thread and stream. A collective. `masks` finds the shared rows, on their owner. `find_local`
    makes local rows of keys. `meanwhile` is called while a GPU divides them, once what travels has
    arrived. Returns the parts of both requests: the first part of each has the shared rows, the
    others are pieces of the rest."""
    requests, ranks = (current, following), transport.world
    with transport.ledger.span("compare"):
        served = masks(current.owned, following.owned)
    requested = _send_back(served, [one.whole for one in requests], transport)
    relays = [one.whole.relay for one in requests if one.whole.relay is not None]
    if relays:  # the leaders tell the ranks of their machine
        members = [marks[relay.members] for marks, relay in zip(requested, relays, strict=True)]
        read = _send_back(members, relays, transport)
    with transport.ledger.span("compare"):
        lists = []
        for place, one in enumerate(requests):
            whole, pieces = one.whole, one.pieces

            def number(keys: Tensor, pieces: int = pieces) -> Tensor:
                # a single piece has all rows, whatever their numbers
                return find_local(keys) if pieces > 1 else keys

            local = number(one.keys)
            lists.append(MarkedRows(requested[place], local, whole.send, pieces))
            lists.append(MarkedRows(served[place], one.owned, whole.receive, pieces))
            if relays:
                relay, own = relays[place], number(one.index.keys)
                own, others = own[relay.requested], local[relay.members]
                lists.append(MarkedRows(read[place], own, relay.send, pieces))
                lists.append(MarkedRows(members[place], others, relay.receive, pieces))
        positions, counts = divide_rows(lists)
        read_counts = begin_reading(counts)  # one trip to the host for all split sizes
    meanwhile()
    with transport.ledger.span("compare"):
        numbers, places, parts = iter(read_counts()), iter(positions), []
        for one in requests:
            hops = []
            for _ in range(2 if relays else 1):
                bins = (1 + one.pieces) * ranks
                send, receive = ([next(numbers) for _ in range(bins)] for _ in range(2))
                hops.append(split_request(next(places), send, next(places), receive, ranks))
            parts.append(_join_hops(hops, one.whole.relay))
        return parts[0], parts[1]


def _send_back(
    marks: Sequence[Tensor], ways: Sequence[RequestPart | Relay], transport: Transport
) -> list[Tensor]:
    """Marks [sum(receive)] of two requests, to those that sent them -> [sum(send)] of each. A
    collective."""
    with transport.ledger.span("compare"):
        # One message to each requester: marks of its current request, then of the following one.
        parts = (torch.split(own, way.receive) for own, way in zip(marks, ways, strict=True))
        message = torch.cat([part for pair in zip(*parts, strict=True) for part in pair])
        send = [sum(pair) for pair in zip(*(way.receive for way in ways), strict=True)]
        sizes = list(zip(*(way.send for way in ways), strict=True))
        receive = [sum(pair) for pair in sizes]
    answer = transport.all_to_all(message.view(torch.uint8), send, receive, "ids").wait()
    by_sender = torch.split(answer.view(torch.bool), [size for pair in sizes for size in pair])
    return [torch.cat(by_sender[place::2]) for place in range(2)]


def _join_hops(hops: Sequence[list[RequestPart]], whole: Relay | None) -> list[RequestPart]:
    """The parts of a request to the owners, with those of what the machine's ranks request."""
    if whole is None:
        return hops[0]
    rows = sum(sum(part.send) for part in hops[0])
    places, joined = whole.members.new_empty(rows), []  # places: each row's within its part
    for part in hops[0]:
        assert part.requested is not None
        numbers = torch.arange(sum(part.send), dtype=places.dtype, device=places.device)
        places.index_copy_(0, part.requested.long(), numbers)
    members = places[whole.members]
    for part, within in zip(*hops, strict=True):
        assert within.requested is not None and within.served is not None
        read, passed = whole.requested[within.requested], members[within.served]
        joined.append(replace(part, relay=Relay(read, passed, within.send, within.receive)))
    return joined
