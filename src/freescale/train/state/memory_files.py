"""Memory files, and how ranks send them to each other."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from freescale.transport.api import Transport, gather_json

_PIECE = 1 << 23  # bytes to each rank at once


def create_file(size: int) -> int:
    """The descriptor of a new memory file."""
    file = os.memfd_create("freescale-snapshot", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    return file


def exchange_files(transport: Transport, outgoing: Mapping[int, Tensor]) -> dict[int, int]:
    """Sends bytes [n] on the host to some ranks, by rank, and receives what others send: the
    descriptors of memory files, by rank. A collective. Urgent traffic passes between two pieces."""
    rank, world = transport.rank, transport.world
    sizes = {str(peer): data.numel() for peer, data in outgoing.items()}
    everyones = gather_json(transport, sizes)
    table = [[int(part.get(str(peer), 0)) for peer in range(world)] for part in everyones]
    files: dict[int, int] = {}
    try:
        for peer in range(world):
            if table[peer][rank]:
                files[peer] = create_file(table[peer][rank])
        for begin in range(0, max(max(row) for row in table), _PIECE):
            send = [_cut(table[rank][peer], begin) for peer in range(world)]
            receive = [_cut(table[peer][rank], begin) for peer in range(world)]
            parts = [outgoing[peer][begin : begin + size] for peer, size in enumerate(send) if size]
            data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
            arrived = transport.all_to_all(data, send, receive, "rows").wait(host=True)
            for peer, piece in enumerate(torch.split(arrived, receive)):
                if len(piece):
                    os.pwrite(files[peer], piece.numpy().data, begin)
    except BaseException:
        for file in files.values():
            os.close(file)
        raise
    return files


def _cut(size: int, begin: int) -> int:
    return max(0, min(_PIECE, size - begin))
