"""Cases for the Triton attention, and its errors against the reference. As a program: all cases,
through the interpreter."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from freescale.kernels.attention import reference as attention
from freescale.kernels.attention import softmax as softmax_attention
from freescale.kernels.attention import triton as triton_attention
from freescale.kernels.attention import triton_launch as launches
from freescale.kernels.attention import triton_plan
from freescale.kernels.attention.plan import plan_attention
from freescale.kernels.attention.triton import WeightDropout
from freescale.kernels.attention.triton_launch import KeyLaunch
from freescale.visible import Visible

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
    "parts, semi-local": dict(
        name="parts", candidates=True, biases=True, first=(130, 7, 128), visible=(3, 50)
    ),
    **{
        f"{kind}, {name}{' candidates' * candidates}, {first} and {last}": dict(
            name=name, candidates=candidates, visible=(first, last), **options
        )
        for kind, options in {
            "visible": {},
            "visible biases": {"biases": True},
            "visible biases in memory": {"biases": True, "dtype": "float16"},
            "visible softmax": {"softmax": True},
        }.items()
        for name, candidates, first, last in [
            ("giant", False, 5, 70),
            ("giant", True, 64, 1),
            ("mixed", True, 0, 40),
            ("mixed", True, 3, 200),
        ]
    },
    **{
        f"softmax, {name}{' candidates' * candidates}{' dropout' * (keep < 1)} {kind}": dict(
            name=name, candidates=candidates, softmax=True, keep=keep, **options
        )
        for name, candidates, keep, kind, options in [
            ("mixed", False, 1.0, "", {}),
            ("mixed", True, 0.7, "", {}),
            ("giant", True, 0.9, "", {}),
            ("giant", False, 0.5, "narrow", {"dtype": "float16"}),
            ("equal", False, 0.8, "wide", {"widths": (256, 256), "dtype": "float16"}),
            ("equal", True, 0.8, "", {}),
            ("empty", False, 0.8, "", {}),
        ]
    },
    "softmax, high scores": dict(name="giant", candidates=True, softmax=True, size=5.0),
    "long times": dict(name="equal", candidates=True, biases=True, step=10**10),
}


@contextmanager
def choose_variant(width, pair_budget=None, apart=False):
    """Runs other kernels than the defaults. apart: the gradients of keys and values in two
    kernels."""
    with ExitStack() as stack:
        if pair_budget is not None:
            stack.enter_context(mock.patch.object(triton_attention, "PAIR_BUDGET", pair_budget))
        if apart:
            both = KeyLaunch(64, 64, 4, 1, keys=False), KeyLaunch(64, 32, 4, 1, values=False)
            stack.enter_context(mock.patch.dict(launches.BACKWARD_KV, {width: both}))
        yield


def compare(
    name,
    candidates,
    biases=False,
    dtype="float32",
    widths=(32, 32),
    sliced=False,
    step=3000,
    device="cpu",
    heads=2,
    pair_budget=None,
    apart=False,
    visible=None,  # first and last
    softmax=False,
    keep=1.0,
    size=1.0,  # of queries and keys
    first=None,  # queries before these are left out
):
    """Relative errors of the output and of all gradients against the reference in float64, by
    name."""
    generator = torch.Generator().manual_seed(0)
    sizes, counts = LENGTHS[name] if isinstance(name, str) else name
    tokens, d_qk, d_v = sum(sizes), *widths

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    together = draw(tokens, heads * (2 * d_qk + d_v)) * size
    together = together.to(device, getattr(torch, dtype))
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
    lengths = torch.tensor(sizes, device=device)
    others["alpha"] = d_qk**-0.5
    seen = visible and Visible(*visible)
    counted = torch.ones(tokens, 1, 1, dtype=torch.bool, device=device)
    for start, skipped in zip(torch.tensor([0, *sizes]).cumsum(0).tolist(), first or ()):
        counted[start : start + skipped] = False
    if softmax:
        counts = others.pop("candidate_counts", None)
        keys = torch.randint(-(2**62), 2**62, (tokens,), generator=generator).to(device)
        others["dropout"] = WeightDropout(keys, 5, keep) if keep < 1 else None
        plain, triton = softmax_attention.softmax_attention, triton_attention.softmax_attention
        plans = [
            make(lengths, heads, candidate_counts=counts, visible=seen)
            for make in (softmax_attention.plan_softmax_attention, triton_plan.plan_attention)
        ]
    else:
        others |= {"lengths": lengths, "scale_length": 50}
        plain, triton = attention.hstu_attention, triton_attention.hstu_attention
        plans = [None, None]
        if visible is not None or first is not None:
            options = {"candidate_counts": others.get("candidate_counts"), "visible": seen}
            if biases:
                options |= {"timestamps": others["timestamps"], "buckets": BUCKETS}
                options["distances"] = True
            plans = [
                plan_attention(lengths, heads, **options),
                triton_plan.plan_attention(lengths, heads, first=first, **options),
            ]
        if first is not None:
            whole = triton_plan.plan_attention(lengths, heads)
            assert plans[1].pair_blocks < whole.pair_blocks
    weight = draw(tokens, heads, d_v).to(device, getattr(torch, dtype))

    def run(function, dtype, plan):
        inputs = {
            key: (x if dtype is None else x.to(dtype)).detach().requires_grad_()
            for key, x in leaves.items()
        }
        out = torch.where(counted, function(**inputs, **others, plan=plan), 0)
        grads = torch.autograd.grad((out * weight.to(out.dtype)).sum(), list(inputs.values()))
        grads = [torch.where(counted, grads[0], 0), *grads[1:]]
        return dict(zip(["out", *inputs], [out.detach(), *grads], strict=True))

    with choose_variant(max(widths), pair_budget, apart):
        ours = run(triton, None, plans[1])
    exact = run(plain, torch.float64, plans[0])
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


def skipping(device="cpu"):
    """Whether tiles that no query sees are not visited: in a product, a weight of zero would make
    NaN of NaN. The last queries do not see keys in the middle, and these not the last queries."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(400, 1, 32, generator=generator).to(device) for _ in range(4))
    v[128:192] = torch.nan
    q[330:] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    lengths = torch.tensor([400], device=device)
    found = {}
    for softmax in (False, True):
        plan = triton_plan.plan_attention(lengths, 1, visible=Visible(5, 70))
        if softmax:
            out = triton_attention.softmax_attention(*leaves, plan, alpha=0.2)
        else:
            options = {"scale_length": 9, "alpha": 0.2, "plan": plan}
            out = triton_attention.hstu_attention(*leaves, lengths, **options)
        _, of_k, of_v = torch.autograd.grad(out, leaves, weight)
        found[f"keys, softmax {softmax}"] = bool(out[320:330].isfinite().all())
        found[f"values, softmax {softmax}"] = bool(of_v[64:192].isfinite().all())
        found[f"not all, softmax {softmax}"] = not out[192:250].isfinite().any()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps(
            {case: compare(**options) for case, options in CASES.items()}
            | {"isolation": isolation(), "skipping": skipping()}
        )
    )
