"""Rows of a table in the order of ids, as TorchRec has them, and in the spread order in which ranks
own them here (embedding/layout.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freescale.embedding.layout import ShardLayout, find_ids, spread_ids
from freescale.torchrec.checkpoint_source import Take
from freescale.transport.api import Transport


def put_rows(local: Tensor, layout: ShardLayout, rank: int) -> Take:
    """What takes a table [rows, ...] in the order of ids, piece by piece, and keeps what is a
    rank's: local [n, ...], in spread order. Pieces may divide the columns, too."""
    rows = layout.specs[0].rows
    first, last = layout.get_owned_range(0, rank)

    def put(piece: Tensor, offsets: Sequence[int]) -> None:
        ids = torch.arange(offsets[0], offsets[0] + piece.shape[0])
        position = spread_ids(ids, rows)
        mine = (position >= first) & (position < last)
        values = piece[mine].to(local.device, local.dtype)
        places = (position[mine] - first).to(local.device)
        if local.dim() == 1:  # one value for each row, which may be [rows, 1]
            local[places] = values.view(-1)
        else:
            local[places, offsets[1] : offsets[1] + piece.shape[1]] = values

    return put


def collect_block(local: Tensor, layout: ShardLayout, rank: int, transport: Transport) -> Tensor:
    """A rank's part of a table in spread order [n, ...] -> the same part of the table in the order
    of ids. A collective if the layout has more ranks than one."""
    rows, block = layout.specs[0].rows, layout.block(0)
    first, last = layout.get_owned_range(0, rank)
    position = spread_ids(torch.arange(first, last, device=local.device), rows)
    if layout.world == 1:
        return local.index_select(0, position)
    receivers = find_ids(torch.arange(first, last, device=local.device), rows) // block
    send = torch.bincount(receivers, minlength=layout.world).tolist()
    receive = torch.bincount(position // block, minlength=layout.world).tolist()
    sent = local.index_select(0, receivers.argsort(stable=True))
    received = transport.all_to_all(sent, send, receive, "rows").wait()
    # By owner, and of each owner in its own order: in all by position.
    collected = torch.empty_like(received)
    collected[position.argsort()] = received
    return collected
