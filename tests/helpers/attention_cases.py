"""Cases for the Triton attention, and its errors against the reference. As a program: all cases,
through the interpreter."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from freescale.kernels.attention import reference as attention
from freescale.kernels.attention import triton as triton_attention
from freescale.kernels.attention import triton_launch as launches
from freescale.kernels.attention import triton_plan
from freescale.kernels.attention.triton_launch import AttentionLaunch, KeyLaunch, StoredLaunch

BUCKETS = 20
LENGTHS = {
    "mixed": ([70, 0, 1, 150, 64], [5, 0, 1, 70, 0]),
    "equal": ([65, 65], [65, 1]),
    "giant": ([2, 200, 3], [0, 100, 1]),
    "parts": ([300, 40, 270], [5, 1, 0]),
    "ones": ([1] * 24, [1, 0] * 12),
    "empty": ([0, 0], [0, 0]),
}
CASES = {
    f"{name}{' candidates' * candidates}{' biases' * biases}": dict(
        name=name, candidates=candidates, biases=biases
    )
    for name, candidates, biases in [
        ("mixed", False, False),
        ("mixed", True, True),
        ("equal", True, False),
        ("equal", False, True),
        ("giant", True, True),
        ("ones", True, True),
        ("empty", True, True),
    ]
} | {
    "half precision": dict(name="mixed", candidates=True, biases=True, dtype="float16"),
    "different widths": dict(name="equal", candidates=False, biases=False, widths=(32, 64)),
    "slices of one projection": dict(name="equal", candidates=False, biases=False, sliced=True),
    "half precision, computed biases": dict(
        name="equal", candidates=True, biases=True, dtype="float16", pair_budget=0
    ),
    "half precision, biases alone in memory": dict(
        name="equal", candidates=True, biases=True, dtype="float16", pair_budget=40_000
    ),
    "stored": dict(name="giant", candidates=True, biases=False, dtype="float16", stored=True),
    "stored biases": dict(name="equal", candidates=True, biases=True, dtype="float16", stored=True),
    "apart": dict(name="equal", candidates=True, biases=False, dtype="float16", apart=True),
    "wide": dict(name="equal", candidates=False, biases=False, dtype="float16", widths=(256, 256)),
    # queries before these are left out: the tiles of the first 128 of two samples
    "parts": dict(name="parts", candidates=True, biases=True, first=(130, 0, 256)),
    "parts, half precision": dict(
        name="parts", candidates=False, biases=True, dtype="float16", first=(280, 7, 128)
    ),
    "parts, computed biases": dict(
        name="parts",
        candidates=True,
        biases=True,
        dtype="float16",
        first=(280, 7, 128),
        pair_budget=0,
    ),
    "parts, stored": dict(
        name="parts",
        candidates=True,
        biases=True,
        dtype="float16",
        first=(130, 7, 128),
        stored=True,
    ),
    "long times": dict(name="equal", candidates=True, biases=True, step=10**10),
}


@contextmanager
def choose_variant(width, pair_budget=None, stored=None, apart=False):
    """Runs other kernels than the defaults. stored: backward with or without stored scores; apart:
    the gradients of keys and values in two kernels."""
    with ExitStack() as stack:
        if pair_budget is not None:
            stack.enter_context(mock.patch.object(triton_attention, "PAIR_BUDGET", pair_budget))
        if stored is not None:
            for table, tile in (("STORED", 128), ("BIASED_STORED", 64)):
                of_queries = AttentionLaunch(tile, min(64, 8192 // width), tile // 16, 1)
                both = StoredLaunch(of_queries, AttentionLaunch(128, 64, 8, 1))
                one = {width: both} if stored else {}
                stack.enter_context(mock.patch.object(launches, table, one))
        if apart:
            both = KeyLaunch(64, 64, 4, 1, keys=False), KeyLaunch(64, 32, 4, 1, values=False)
            stack.enter_context(mock.patch.dict(launches.BACKWARD_KV, {width: both}))
        yield


def compare(
    name,
    candidates,
    biases,
    dtype="float32",
    widths=(32, 32),
    sliced=False,
    step=3000,
    device="cpu",
    heads=2,
    pair_budget=None,
    stored=None,
    apart=False,
    first=None,
):
    """Relative errors of the output and of all gradients against the reference in float64, by
    name."""
    generator = torch.Generator().manual_seed(0)
    sizes, counts = LENGTHS[name] if isinstance(name, str) else name
    tokens, d_qk, d_v = sum(sizes), *widths

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    together = draw(tokens, heads * (2 * d_qk + d_v)).to(device, getattr(torch, dtype))
    parts = together.split([heads * d_qk, heads * d_qk, heads * d_v], 1)
    q, k, v = (
        x.unflatten(1, (heads, -1)) if sliced else x.unflatten(1, (heads, -1)).contiguous()
        for x in parts
    )
    leaves = {"q": q, "k": k, "v": v}
    if biases:
        leaves |= {
            "position_bias": draw(max(sizes) + 2).to(device),
            "time_bias": draw(BUCKETS + 1).to(device),
        }
    others = (
        {
            "timestamps": torch.randint(-step // 100, step, (tokens,), generator=generator)
            .cumsum(0)
            .to(device)
        }
        if biases
        else {}
    )
    if candidates:
        others["candidate_counts"] = torch.tensor(counts, device=device)
    others |= {
        "lengths": torch.tensor(sizes, device=device),
        "scale_length": 50,
        "alpha": d_qk**-0.5,
    }
    weight = draw(tokens, heads, d_v).to(device, getattr(torch, dtype))
    seen = torch.ones(tokens, 1, 1, dtype=torch.bool, device=device)
    plan = None
    if first is not None:
        for start, skipped in zip(torch.tensor([0, *sizes]).cumsum(0).tolist(), first):
            seen[start : start + skipped] = False
        named = {n: others[n] for n in ("candidate_counts", "timestamps") if n in others}
        plan = triton_plan.plan_attention(
            others["lengths"], heads, first=first, buckets=BUCKETS, distances=True, **named
        )
        assert plan.pair_blocks < triton_plan.plan_attention(others["lengths"], heads).pair_blocks

    def run(function, dtype):
        inputs = {
            key: (x if dtype is None else x.to(dtype)).detach().requires_grad_()
            for key, x in leaves.items()
        }
        planned = {"plan": plan} if dtype is None and plan is not None else {}
        out = function(**inputs, **others, **planned)
        out = torch.where(seen, out, 0)
        grads = torch.autograd.grad((out * weight.to(out.dtype)).sum(), list(inputs.values()))
        grads = [torch.where(seen, grads[0], 0), *grads[1:]]
        return dict(zip(["out", *inputs], [out.detach(), *grads], strict=True))

    with choose_variant(max(widths), pair_budget, stored, apart):
        ours = run(triton_attention.hstu_attention, None)
    exact = run(attention.hstu_attention, torch.float64)
    assert all(ours[key].dtype == leaves[key].dtype for key in leaves)
    return {
        key: ((ours[key].double() - x).norm() / x.norm().clamp(min=1e-9)).item()
        for key, x in exact.items()
    }


def isolation(device="cpu"):
    """Whether the samples before and after one of NaN stay finite, although their tiles overlap
    it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(3 * 70, 1, 32, generator=generator).to(device) for _ in range(4))
    lengths = torch.tensor([70, 70, 70], device=device)
    for x in (q, k, v, weight):
        x[70:140] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = triton_attention.hstu_attention(*leaves, lengths, scale_length=9, alpha=0.2)
    results = [out.detach(), *torch.autograd.grad(out, leaves, weight)]
    return {
        n: all(bool(x[at].isfinite().all()) for x in results)
        for n, at in (("before", slice(70)), ("after", slice(140, None)))
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps(
            {case: compare(**options) for case, options in CASES.items()}
            | {"isolation": isolation()}
        )
    )
