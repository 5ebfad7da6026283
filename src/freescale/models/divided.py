"""Histories that are divided over ranks, inside HSTU.

SiLU attention is a plain sum over keys, so a part of a history needs nothing of the others but the
keys and values of earlier parts. Each layer sends its own forward, computes the other samples of
the batch, and then attends to both. Backward mirrors it: gradients of the keys and values travel
while other samples compute. How they travel is not known here: `Parts.exchange` is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from freescale.batch import HostSizes, Parts
from freescale.kernels.dispatch.attention import hstu_attention
from freescale.kernels.layer.reference import add_positions
from freescale.kernels.upload import upload
from freescale.models.encoder import Encoder
from freescale.models.hstu import HSTU
from freescale.models.prefix import Prefix


class _Rows:
    """Which rows of the parts' tokens travel, and where they belong. A part's events come first
    among its tokens, its candidates last."""

    def __init__(self, parts: Parts, tokens: Sequence[int]) -> None:
        """`tokens` [parts]: of each part, candidates included."""
        assert parts.exchange is not None, "divided histories need an exchange"
        self.parts, self.exchange = parts, parts.exchange
        self.tokens, starts = list(tokens), [0, *accumulate(tokens)]
        # what comes, in its order: each range is read by a part
        self._received = sorted({place for earlier in parts.earlier for place in earlier})
        ends = [0, *accumulate(parts.events[part] for part, _ in parts.sent)]
        places = zip(ends[:-1], ends[1:], strict=True)
        # (the later part that reads them, their place in the message, their rows of this rank)
        self._sent = [
            (reader, place, (starts[part], starts[part] + parts.events[part]))
            for (part, reader), place in zip(parts.sent, places, strict=True)
        ]
        self.lengths = [start + size for start, size in zip(parts.starts, tokens, strict=True)]
        lasts = list(accumulate(self.lengths))
        # range of each part's own tokens, which follow those of the earlier parts
        self.places = [(last - size, last) for last, size in zip(lasts, tokens, strict=True)]

    def select_sent(self, rows: Tensor) -> Tensor:
        """[sent, ...]: contiguous ranges, in the order of the ranks that they go to."""
        return torch.cat([rows[:0], *(rows[a:b] for _, _, (a, b) in self._sent)])

    def add_returned(self, total: Tensor, returned: Tensor) -> None:
        """Adds gradients of what was sent, in the order of the parts that they come from."""
        for _, (first, last), (a, b) in sorted(self._sent):
            total[a:b] += returned[first:last]

    def join(self, own: Tensor, received: Tensor) -> Tensor:
        """[sum(lengths), ...]: of each part the rows of earlier parts, then its own."""
        # not slices: backward would fill a tensor with zeros for each
        ranges = torch.split(received, [b - a for a, b in self._received])
        by_place = dict(zip(self._received, ranges, strict=True))
        pieces = [] if ranges else [received]  # backward sends its gradient, of no rows
        for part, earlier in zip(torch.split(own, self.tokens), self.parts.earlier, strict=True):
            pieces += [*(by_place[place] for place in earlier), part]
        return torch.cat(pieces)

    def pad(self, own: Tensor) -> Tensor:
        """As `join`, with zeros for earlier parts."""
        pieces = []
        for part, start in zip(torch.split(own, self.tokens), self.parts.starts, strict=True):
            pieces += [own.new_zeros(start, *own.shape[1:]), part]
        return torch.cat(pieces)

    def cut(self, joined: Tensor) -> Tensor:
        """The inverse of `pad`."""
        return torch.cat([joined[first:last] for first, last in self.places])


class _Send(torch.autograd.Function):
    """Sends keys and values; backward adds the gradients that come back for them. The third output
    ties `_Receive` to it."""

    @staticmethod
    def forward(ctx, k, v, rows, pending):  # type: ignore[no-untyped-def]
        ctx.rows, ctx.pending, ctx.width = rows, pending, k[0].numel()
        flat = torch.cat([rows.select_sent(x.flatten(1)) for x in (k, v)], dim=1)
        pending.append(rows.exchange(flat, False))
        return k.view_as(k), v.view_as(v), k.new_empty(0)

    @staticmethod
    def backward(ctx, grad_k, grad_v, _):  # type: ignore[no-untyped-def]
        returned = ctx.pending.pop()()
        grads = []
        for grad, part in zip((grad_k, grad_v), returned.tensor_split([ctx.width], dim=1)):
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = grad.flatten(1).to(wide, copy=True)
            ctx.rows.add_returned(total, part)
            grads.append(total.to(grad.dtype).view(grad.shape))
        return *grads, None, None


class _Receive(torch.autograd.Function):
    """Waits for keys and values [received, columns]; backward sends their gradients on the way."""

    @staticmethod
    def forward(ctx, link, rows, pending):  # type: ignore[no-untyped-def]
        ctx.rows, ctx.pending = rows, pending
        return pending.pop()()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.pending.append(ctx.rows.exchange(grad, True))
        return grad.new_empty(0), None, None


class EarlierParts:
    """The attention of a batch's parts, to their own events and to those of earlier parts."""

    def __init__(self, rows: _Rows, compute: Iterator[None]) -> None:
        """`compute` computes a layer of the other samples at each step."""
        self._rows, self._compute = rows, compute

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *whole: Tensor, **options: Any) -> Tensor:
        """q, k, v [tokens, heads, d] of the parts; the others as of `hstu_attention`, of their
        histories up to the parts' ends. Returns [tokens, heads, d_v]."""
        rows, pending = self._rows, list[Callable[[], Tensor]]()
        k, v, link = _Send.apply(k, v, rows, pending)  # type: ignore[no-untyped-call]
        with saved_tensors_hooks(lambda x: x, lambda x: x):  # not recomputed here
            next(self._compute, None)
        received = _Receive.apply(link, rows, pending)  # type: ignore[no-untyped-call]
        keys, values = received.split([k[0].numel(), v[0].numel()], dim=1)
        k = rows.join(k, keys.unflatten(1, k.shape[1:]))
        v = rows.join(v, values.unflatten(1, v.shape[1:]))
        return rows.cut(hstu_attention(rows.pad(q), k, v, *whole, **options))


def encode_divided(
    encoder: Encoder, parts: Parts, x: Tensor, lengths: Tensor, keys: Tensor | None,
    timestamps: Tensor | None, candidate_counts: Tensor | None = None,
    host: HostSizes | None = None, prefix: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `HSTU.forward`, for a batch that begins with parts: between the exchanges of each layer,
    the other samples run through that layer as without parts."""
    assert isinstance(encoder, HSTU) and host is not None, "pipelines refuse other encoders"
    timestamps = encoder._check_inputs(x, timestamps)
    count, device = len(parts.starts), x.device
    sizes = host.lengths.tolist()
    ends = [0, *accumulate(sizes)]

    def select(first: int, last: int) -> dict[str, Any]:
        """The arguments of `HSTU.forward` for some samples."""
        rows, samples = slice(ends[first], ends[last]), slice(first, last)

        def cut(tensor: Tensor | None, at: slice) -> Tensor | None:
            return None if tensor is None else tensor[at]

        return {
            "x": x[rows],
            "lengths": lengths[samples],
            "keys": cut(keys, samples),
            "timestamps": cut(timestamps, rows),
            "candidate_counts": cut(candidate_counts, samples),
            "host": HostSizes(
                host.lengths[samples], cut(host.candidate_counts, samples), host.time_span
            ),
            "prefix": cut(prefix, samples),
        }

    others: list[Tensor] = []  # what their last layer has computed

    def compute_others() -> Iterator[None]:
        if ends[-1] == ends[count]:
            return
        x, *inputs = encoder._begin(**select(count, len(sizes)))
        for number in range(len(encoder.layers)):
            x = encoder._run_layers(x, *inputs, layers=slice(number, number + 1))  # type: ignore[misc]
            others[:] = [x]
            yield

    own, rows = select(0, count), _Rows(parts, sizes[:count])
    times: Tensor | None = own["timestamps"]
    arriving: Callable[[], Tensor] | None = None
    if encoder.has_time_bias:
        assert times is not None
        arriving = rows.exchange(rows.select_sent(times), False)
    encoder._check_sizes(own["x"], sum(sizes[:count]), max(parts.wholes))
    starts = upload(np.array(parts.starts), device)
    counts, host_counts = own["candidate_counts"], own["host"].candidate_counts
    dropping = encoder._choose_keys(own["keys"], lengths[:count])
    hidden, token_keys = add_positions(
        own["x"], encoder.position, lengths[:count], counts, dropping,
        scale=encoder.input_scale, keep=1 - encoder.input_dropout, first=starts,
    )  # fmt: skip
    before = None
    if own["prefix"] is not None:
        before = Prefix(
            encoder, encoder.heads, encoder.widths, own["prefix"], own["host"].lengths, dropping
        )
    if arriving is not None and times is not None:
        times = rows.join(times, arriving())
    on_host = HostSizes(torch.tensor(rows.lengths), host_counts)
    wholes = lengths[:count] + starts
    plan = encoder._plan_attention(wholes, counts, times, on_host, parts.starts)
    computing = compute_others()
    hidden = encoder._run_layers(
        hidden, plan.lengths, token_keys, times, counts, plan,
        prefix=before, attend=EarlierParts(rows, computing),
    )  # fmt: skip
    for _ in computing:
        pass
    return torch.cat([hidden, *others])
