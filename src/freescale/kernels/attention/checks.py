"""What the plans of all versions of the attention have in common, and the checks of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from freescale.batch import HostSizes
from freescale.visible import Visible


@dataclass(frozen=True)
class Plan:
    """What the layers of one step share. Made once from a batch's lengths; nothing else reads the
    device."""

    lengths: Tensor  # [samples] int64, candidates included
    heads: int
    tokens: int
    candidate_counts: Tensor | None  # [samples] int64
    times: Tensor | None  # [tokens]
    buckets: int  # of the time bias; 0 without one
    distances: bool  # whether there is a position bias
    longest_history: int
    longest_distance: int  # between two positions
    visible: Visible | None  # None: everything before a token

    @property
    def timed(self) -> bool:
        return self.times is not None


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def check_same_device(**tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(
            f"tensors lie on different devices: { {n: str(d) for n, d in devices.items()} }"
        )


class Sizes(NamedTuple):
    """Sizes of a batch's samples, on the host."""

    lengths: np.ndarray  # [samples] tokens, candidates included
    history: np.ndarray  # [samples] tokens before the candidates
    longest_history: int
    longest_distance: int  # between two positions


def read_sizes(lengths: Tensor, candidate_counts: Tensor | None, host: HostSizes | None) -> Sizes:
    """Reads the sizes from `host`, or from the device without one, and checks them."""
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
                f"the {name} on the host are not those of this batch: their shapes differ"
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
                "tokens; lengths count history and candidates together"
            )
        history = own - counts
        positions = history + (counts > 0)  # all candidates share one position
    longest = int(history.max(initial=0)), max(0, int(positions.max(initial=0)) - 1)
    return Sizes(own, history, *longest)


def read_batch(
    lengths: Tensor,
    heads: int,
    candidate_counts: Tensor | None,
    timestamps: Tensor | None,
    host: HostSizes | None,
) -> Sizes:
    """Checks what a plan is made from and returns the sizes."""
    if heads < 1:
        raise ValueError(f"heads must be at least 1, not {heads}")
    check_same_device(lengths=lengths, candidate_counts=candidate_counts, timestamps=timestamps)
    sizes = read_sizes(lengths, candidate_counts, host)
    shape = (int(sizes.lengths.sum()),)
    if timestamps is not None and (timestamps.dtype != torch.int64 or timestamps.shape != shape):
        raise ValueError(
            f"timestamps must be int64 [{shape[0]}], one per token, not {timestamps.dtype} "
            f"{list(timestamps.shape)}"
        )
    return sizes


def check_or_plan(
    plan: AnyPlan | None,
    make: Callable[..., AnyPlan],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale_length: int,
    candidate_counts: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    timestamps: Tensor | None,
) -> AnyPlan:
    """Checks the arguments of `hstu_attention`. Returns their plan, which it makes if there is
    none."""
    if q.ndim != 3 or v.ndim != 3 or k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q, k [tokens, heads, d_qk] and v [tokens, heads, d_v] do not fit: {list(q.shape)}, "
            f"{list(k.shape)}, {list(v.shape)}"
        )
    check_dtype_and_scale(q, k, v, scale_length)
    biases = {"position_bias": position_bias, "time_bias": time_bias}
    check_same_device(q=q, k=k, v=v, lengths=lengths, **biases, timestamps=timestamps)
    for name, bias in biases.items():
        if bias is not None and (
            bias.ndim != 1 or bias.numel() < 1 or not bias.is_floating_point()
        ):
            raise ValueError(
                f"{name} must be a floating 1-d tensor, not {bias.dtype} {list(bias.shape)}"
            )
    if time_bias is not None and timestamps is None:
        raise ValueError("time_bias needs timestamps, one per token")
    if plan is None:
        plan = make(
            lengths, q.shape[1], candidate_counts=candidate_counts,
            timestamps=None if time_bias is None else timestamps,
            buckets=0 if time_bias is None else time_bias.numel() - 1,
            distances=position_bias is not None,
        )  # fmt: skip
    tokens, heads, _ = q.shape
    check_plan(plan, tokens, heads, lengths, candidate_counts, position_bias, time_bias)
    check_same_device(q=q, plan=plan.lengths)
    return plan


def check_dtype_and_scale(q: Tensor, k: Tensor, v: Tensor, scale_length: float) -> None:
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k and v must share one floating dtype, not {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if scale_length < 1:
        raise ValueError(
            f"scale_length must be at least 1 (the configured maximum length), not {scale_length}"
        )


def check_plan(
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
            f"the plan has {plan.buckets} time buckets, time_bias {time_bias.numel() - 1}; make a "
            "plan for these"
        )
    if position_bias is not None and not plan.distances:
        raise ValueError("position_bias needs a plan made with distances=True")
    if position_bias is not None and plan.longest_distance >= position_bias.numel():
        raise ValueError(
            f"position_bias has {position_bias.numel()} entries, but positions lie up to "
            f"{plan.longest_distance} apart; cut the samples or raise its size"
        )
