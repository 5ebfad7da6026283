"""Memory files between ranks: in pieces, so that memory for them is bounded and urgent traffic of
training passes between two."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from freescale.transport.api import Transport, gather_json

_PIECE = 1 << 23  # bytes of a piece, to each rank


def exchange_files(transport: Transport, outgoing: Mapping[int, Tensor]) -> dict[int, int]:
    """Sends bytes [n] on the host to some ranks, by rank, and receives what others send: by rank,
    the descriptors of memory files. A collective, over a channel of bulk traffic or the main
    thread's."""
    rank, world = transport.rank, transport.world
    sizes = {str(peer): data.numel() for peer, data in outgoing.items()}
    everyones = gather_json(transport, sizes)
    table = [[int(part.get(str(peer), 0)) for peer in range(world)] for part in everyones]
    files: dict[int, int] = {}
    try:
        for peer in range(world):
            if table[peer][rank]:
                files[peer] = os.memfd_create("freescale-snapshot", os.MFD_CLOEXEC)
                os.ftruncate(files[peer], table[peer][rank])
        longest = max(max(row) for row in table)
        for begin in range(0, longest, _PIECE):
            _exchange_piece(transport, outgoing, table, files, begin)
    except BaseException:
        for file in files.values():
            os.close(file)
        raise
    return files


def _exchange_piece(
    transport: Transport,
    outgoing: Mapping[int, Tensor],
    table: list[list[int]],
    files: Mapping[int, int],
    begin: int,
) -> None:
    rank, world = transport.rank, transport.world
    send = [_cut(table[rank][peer], begin) for peer in range(world)]
    receive = [_cut(table[peer][rank], begin) for peer in range(world)]
    parts = [outgoing[peer][begin : begin + size] for peer, size in enumerate(send) if size]
    data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    arrived = transport.all_to_all(data, send, receive, "rows").wait(host=True)
    place = 0
    for peer, size in enumerate(receive):
        if size:
            os.pwrite(files[peer], arrived[place : place + size].numpy().data, begin)
            place += size


def _cut(size: int, begin: int) -> int:
    return max(0, min(_PIECE, size - begin))
