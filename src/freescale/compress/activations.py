"""Activations that cross between ranks, thresholded per sample: the largest of each row travel, and
in backward their gradients.

A module for models that are themselves divided over ranks: between a lower part on some ranks and
an upper part on others, or between features that ranks exchange. In the forward direction positions
and values go in one message; the gradients come back without positions, since both sides know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freescale.compress.entries import view_as_numbers
from freescale.transport.api import Transport


class ThresholdedExchange(nn.Module):
    """x [n, width] -> [sum(receive), width]: rows go to the ranks in rank order, each with its
    `keep` largest entries; the others arrive as zeros, and get no gradient. With keep = width
    nothing is left out, and no positions travel.

    Every rank calls it, with zero rows if it has nothing to send. The gradients travel in backward,
    so every rank also calls backward on something that depends on the result (on its sum, if it
    received nothing).
    """

    def __init__(self, transport: Transport, keep: int) -> None:
        super().__init__()
        if keep < 1:
            raise ValueError(
                f"keep, the entries of a row that travel, must be at least 1, got {keep}"
            )
        self.transport, self.keep = transport, keep

    def forward(
        self, x: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> Tensor:
        """`send`: rows for each rank; `receive`: rows from each, exchanged if not given."""
        if x.dim() != 2:
            raise ValueError(f"a thresholded exchange takes [rows, width], not {list(x.shape)}")
        if self.keep > x.shape[1]:
            raise ValueError(f"keep = {self.keep} is more than the {x.shape[1]} entries of a row")
        world = self.transport.world
        if send is None:
            if world > 1:
                raise ValueError(f"send must say how many rows go to each of the {world} ranks")
            send = [x.shape[0]]
        if len(send) != world or sum(send) != x.shape[0] or min(send) < 0:
            raise ValueError(
                f"send must be rows for each of {world} ranks, {x.shape[0]} in all, "
                f"not {list(send)}"
            )
        if receive is None:
            counts = torch.tensor(list(send), device=x.device)
            receive = (
                self.transport.all_to_all(counts, [1] * world, [1] * world, "ids").wait().tolist()
            )
        if torch.is_grad_enabled() and not x.requires_grad:
            # without, this rank would be missing when the gradients travel
            x = x.detach().requires_grad_()
        leaving = x.shape[0] - send[self.transport.rank]
        self.transport.ledger.count("activation_entries", leaving * x.shape[1])
        self.transport.ledger.count("activation_entries_sent", leaving * self.keep)
        exchanged: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            x, self.transport, self.keep, list(send), list(receive)
        )
        return exchanged

    def extra_repr(self) -> str:
        return f"keep={self.keep}"


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, transport: Transport, keep: int, send: list[int], receive: list[int]
    ) -> Tensor:
        rows, width = x.shape
        ctx.transport, ctx.send, ctx.receive, ctx.shape = transport, send, receive, x.shape
        ctx.whole = keep == width
        if ctx.whole:
            return transport.all_to_all(x.contiguous(), send, receive, "rows").wait().clone()
        positions = x.abs().topk(keep, dim=1, sorted=False).indices  # [rows, keep]
        narrow = positions.to(_choose_index_type(width))
        message = torch.cat(
            [narrow.view(torch.uint8), x.gather(1, positions).view(torch.uint8)], dim=1
        )
        arrived = transport.all_to_all(message, send, receive, "rows").wait()
        index_bytes = keep * narrow.element_size()
        # What arrived has lost its type: the positions first, then the values.
        places = view_as_numbers(arrived[:, :index_bytes], narrow.dtype).long()
        values = view_as_numbers(arrived[:, index_bytes:], x.dtype)
        ctx.save_for_backward(positions, places)
        return x.new_zeros(sum(receive), width).scatter_(1, places, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = gradients[0]
        transport, send, receive = ctx.transport, ctx.send, ctx.receive
        if ctx.whole:
            back = transport.all_to_all(gradient.contiguous(), receive, send, "gradients").wait()
            return back.clone(), None, None, None, None
        positions, places = ctx.saved_tensors
        back = transport.all_to_all(gradient.gather(1, places), receive, send, "gradients").wait()
        return gradient.new_zeros(ctx.shape).scatter_(1, positions, back), None, None, None, None


def _choose_index_type(width: int) -> torch.dtype:
    """The narrowest that holds a position within a row."""
    return torch.uint8 if width <= 1 << 8 else torch.int16 if width <= 1 << 15 else torch.int32
