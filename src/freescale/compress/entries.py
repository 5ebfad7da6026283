"""Sparse entries of a vector: owners, encoding, and sum over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.transport.api import Transport

_INDEX_BYTES = 4


def compute_owner_edges(length: int, world: int) -> list[int]:
    """Edges [world + 1]: rank r owns entries [edges[r], edges[r + 1]). Equal density, equal
    loads."""
    return [length * rank // world for rank in range(world + 1)]


def pack_entries(positions: Tensor, values: Tensor) -> Tensor:
    """positions [n] below 2^31, values [n] -> one message [n, bytes of an entry] uint8."""
    index = positions.to(torch.int32)[:, None].view(torch.uint8)
    return torch.cat([index, values.contiguous()[:, None].view(torch.uint8)], dim=1)


def unpack_entries(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse: positions [n] int64, values [n]."""
    positions = view_as_numbers(message[:, :_INDEX_BYTES], torch.int32)
    return positions.view(-1).long(), view_as_numbers(message[:, _INDEX_BYTES:], dtype).view(-1)


def view_as_numbers(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of a message [n, bytes] as numbers, copied: rows may be unaligned."""
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


@dataclass(frozen=True)
class EntryTraffic:
    """Entries that this rank exchanged."""

    left: int  # entries sent to other ranks: to owners, and sums back
    returned: int  # entries of the sum, over all ranks


def sum_entries(
    vector: Tensor, positions: Tensor, values: Tensor, transport: Transport, kind: str
) -> EntryTraffic:
    """vector [n], zero -> the sum of all ranks' entries, the same bits on every rank. positions
    ascend, each once.

    Entries go to their owners, who add them in rank order and send the sums to all. An AllGather
    would send an entry once per rank that has it; here its sum is sent once.
    """
    rank, world = transport.rank, transport.world
    edges = compute_owner_edges(vector.numel(), world)
    assert max(b - a for a, b in zip(edges[:-1], edges[1:], strict=True)) < 1 << 31, (
        "positions travel as 32 bits"
    )
    first, last = edges[rank], edges[rank + 1]
    cuts = torch.searchsorted(positions, torch.tensor(edges, device=positions.device))
    counts = cuts.diff()  # [world]
    incoming = transport.all_to_all(counts, [1] * world, [1] * world, kind).wait()
    send, receive = counts.tolist(), incoming.tolist()
    begins = torch.repeat_interleave(
        torch.tensor(edges[:-1], device=positions.device), counts, output_size=positions.numel()
    )
    message = pack_entries(positions - begins, values)
    arrived = transport.all_to_all(message, send, receive, kind).wait()
    own = vector[first:last]
    # one rank after another: the order of a sum does not depend on when they arrive
    for part in torch.split(arrived, receive):
        own.index_add_(0, *unpack_entries(part, vector.dtype))
    found = own.nonzero().view(-1)
    size = torch.tensor([found.numel()], device=found.device)
    sizes = transport.all_gather(size, kind).wait().view(-1).tolist()
    others = [0 if peer == rank else 1 for peer in range(world)]
    message = pack_entries(found, own[found]).repeat(world - 1, 1)
    receive = [size * other for size, other in zip(sizes, others, strict=True)]
    send_back = [found.numel() * other for other in others]
    arrived = transport.all_to_all(message, send_back, receive, kind).wait()
    for begin, part in zip(edges[:-1], torch.split(arrived, receive), strict=True):
        place, value = unpack_entries(part, vector.dtype)
        vector[place + begin] = value
    left = sum(send) - send[rank] + found.numel() * (world - 1)
    return EntryTraffic(left, returned=sum(sizes))
