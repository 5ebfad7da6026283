"""Checks that both versions of the attention share, and the sizes that both plans start from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from freescale.batch import HostSizes


class Plan(Protocol):
    """What the checks read of a plan."""

    @property
    def tokens(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def lengths(self) -> Tensor: ...
    @property
    def candidate_counts(self) -> Tensor | None: ...
    @property
    def timed(self) -> bool: ...
    @property
    def buckets(self) -> int: ...
    @property
    def distances(self) -> bool: ...
    @property
    def longest_distance(self) -> int: ...


def check_same_device(**tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(
            f"tensors lie on different devices: { {n: str(d) for n, d in devices.items()} }"
        )


class Sizes(NamedTuple):
    """Of a batch's samples, on the host."""

    lengths: np.ndarray  # [samples] tokens, candidates included
    history: np.ndarray  # [samples] tokens before the candidates
    longest_history: int
    longest_distance: int  # between two positions


def read_sizes(lengths: Tensor, candidate_counts: Tensor | None, host: HostSizes | None) -> Sizes:
    """Checked. Reads the device, unless `host` already holds them."""
    if lengths.dtype != torch.int64 or lengths.ndim != 1:
        raise ValueError(
            f"lengths must be a 1-d int64 tensor, not {lengths.dtype} with {lengths.ndim} axes"
        )
    if candidate_counts is not None and (
        candidate_counts.dtype != torch.int64 or candidate_counts.shape != lengths.shape
    ):
        raise ValueError(
            f"candidate_counts must be int64 {list(lengths.shape)} like lengths, "
            f"not {candidate_counts.dtype} {list(candidate_counts.shape)}"
        )
    host = host or HostSizes(
        lengths.detach().cpu(), None if candidate_counts is None else candidate_counts.cpu()
    )
    for name, there, here in (
        ("lengths", lengths, host.lengths),
        ("candidate counts", candidate_counts, host.candidate_counts),
    ):
        if (None if there is None else there.shape) != (None if here is None else here.shape):
            raise ValueError(
                f"the {name} that the host knows are not those of this batch: they "
                "differ in their shape"
            )
    own = host.lengths.numpy()
    if (own < 0).any():
        raise ValueError(f"lengths must be 0 or more, not {own.min()}")
    history, positions = own, own
    if host.candidate_counts is not None:
        counts = host.candidate_counts.numpy()
        wrong = np.flatnonzero((counts < 0) | (counts > own))
        if wrong.size:
            raise ValueError(
                f"sample {wrong[0]} has {counts[wrong[0]]} candidates among {own[wrong[0]]} "
                "tokens; "
                "lengths count history and candidates together"
            )
        history = own - counts
        positions = history + (counts > 0)  # candidates share one
    return Sizes(
        own, history, int(history.max(initial=0)), max(0, int(positions.max(initial=0)) - 1)
    )


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    timestamps: Tensor | None,
    scale_length: int,
) -> None:
    if q.ndim != 3 or v.ndim != 3 or k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q, k [tokens, heads, d_qk] and v [tokens, heads, d_v] do not fit: {list(q.shape)}, "
            f"{list(k.shape)}, {list(v.shape)}"
        )
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k and v must share one floating dtype, not {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if scale_length < 1:
        raise ValueError(
            f"scale_length must be at least 1 (the configured maximum length), not {scale_length}"
        )
    check_same_device(
        q=q,
        k=k,
        v=v,
        lengths=lengths,
        position_bias=position_bias,
        time_bias=time_bias,
        timestamps=timestamps,
    )
    for name, bias in (("position_bias", position_bias), ("time_bias", time_bias)):
        if bias is not None and (
            bias.ndim != 1 or bias.numel() < 1 or not bias.is_floating_point()
        ):
            raise ValueError(
                f"{name} must be a floating 1-d tensor, not {bias.dtype} {list(bias.shape)}"
            )
    if time_bias is not None and timestamps is None:
        raise ValueError("time_bias needs timestamps, one per token")


def check_plan(
    plan: Plan,
    q: Tensor,
    lengths: Tensor,
    candidate_counts: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
) -> None:
    tokens, heads = q.shape[:2]
    check_plan_sizes(plan, tokens, heads, lengths, candidate_counts, position_bias, time_bias)
    check_same_device(q=q, plan=plan.lengths)


def check_plan_sizes(
    plan: Plan,
    tokens: int,
    heads: int,
    lengths: Tensor,
    candidate_counts: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
) -> None:
    if plan.tokens != tokens:
        raise ValueError(f"lengths add up to {plan.tokens}, but there are {tokens} tokens")
    if plan.heads != heads or plan.lengths.shape != lengths.shape:
        raise ValueError(
            f"the plan is for {plan.heads} heads and {plan.lengths.numel()} samples, not "
            f"{heads} and {lengths.numel()}"
        )
    if (plan.candidate_counts is None) != (candidate_counts is None):
        raise ValueError("the plan and the call must both have candidate_counts, or neither")
    if time_bias is not None and (not plan.timed or plan.buckets != time_bias.numel() - 1):
        raise ValueError(
            f"the plan has {plan.buckets} time buckets, time_bias "
            f"{time_bias.numel() - 1}; make it for these"
        )
    if position_bias is not None and not plan.distances:
        raise ValueError("position_bias needs a plan made with distances=True")
    if position_bias is not None and plan.longest_distance >= position_bias.numel():
        raise ValueError(
            f"position_bias has {position_bias.numel()} entries, but positions lie up to "
            f"{plan.longest_distance} apart; cut the samples or raise its size"
        )
