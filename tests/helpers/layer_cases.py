"""Cases for the Triton operations of a layer, and their errors against the reference. As a program:
all, through the interpreter.

Uninitialised memory is NaN here.
"""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from unittest import mock

import torch

from freescale.kernels.attention import plan as attention_plan
from freescale.kernels.attention import triton_plan as triton_attention_plan
from freescale.kernels.layer import reference as layer
from freescale.kernels.layer import triton as triton_layer
from freescale.kernels.layer import triton_fused as fused_layer
from freescale.kernels.layer import triton_positions
from freescale.models.hstu import HSTU, HSTULayer
from freescale.models.sasrec import SASRec
from freescale.random import derive, draw_keep_mask
from freescale.visible import Visible
from helpers import dlrm_cases

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
SIZES = [(0, 32), (1, 32), (37, 3), (37, 100), (21, 512)]  # tokens, width
CASES = {
    f"{piece}, {tokens} x {width}, {dtype}": dict(
        piece=piece, tokens=tokens, width=width, dtype=dtype
    )
    for piece in ("layer_norm", "swish_norm", "gated_norm", "dropout", "silu_split")
    for tokens, width in SIZES
    for dtype in ("float32", "bfloat16")
    if dtype == "float32" or width == 100
} | {
    "many parts": dict(piece="dropout", tokens=300, width=40, dtype="float32", parts=7),
    "float32 to bfloat16": dict(
        piece="layer_norm", tokens=9, width=64, dtype="float32", out="bfloat16"
    ),
    "a slice of a projection": dict(
        piece="dropout", tokens=9, width=64, dtype="bfloat16", sliced=True
    ),
    "float16": dict(piece="dropout", tokens=9, width=64, dtype="float16"),
}


def drawn(*shape, dtype, device, generator):
    return (torch.randn(*shape, generator=generator) * 2 + 0.5).to(device, getattr(torch, dtype))


def compare(piece, tokens, width, dtype, out=None, sliced=False, parts=None, device="cpu"):
    """Relative errors of outputs and gradients against the reference in float64; whether exactly
    the masked elements are 0."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=dtype):
        return drawn(*shape, dtype=dtype, device=device, generator=generator)

    x, weight, bias = (
        draw(tokens, width),
        draw(width, dtype="float32"),
        draw(width, dtype="float32"),
    )
    gate = draw(tokens, 3 * width)[:, width : 2 * width] if sliced else draw(tokens, width)
    keys = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=generator).to(device)
    drop = {"keys": keys, "stream": 2, "keep": 0.7} if piece == "dropout" else {}
    sizes = [2 * width, width, 3, 1]
    wide, slopes = draw(tokens, sum(sizes)), draw(tokens, sum(sizes))

    def run(module, exact):
        target = torch.float64 if exact else getattr(torch, out or dtype)
        if piece in ("layer_norm", "swish_norm"):
            leaves = {"x": x, "weight": weight, "bias": bias}
            compute = getattr(module, piece)
            function = lambda **leaf: compute(**leaf, eps=1e-6, dtype=target)  # noqa: E731
        elif piece == "silu_split":
            leaves = {"x": wide}
            function = lambda x: torch.cat(module.silu_split(x, sizes), 1)  # noqa: E731
        else:
            leaves = {"x": x, "gate": gate, "weight": weight, "bias": bias}
            function = lambda **leaf: module.gated_norm(**leaf, eps=1e-6, dtype=target, **drop)  # noqa: E731
        leaves = {
            name: (leaf.double() if exact else leaf).detach().requires_grad_()
            for name, leaf in leaves.items()
        }
        result = function(**leaves)
        grads = torch.autograd.grad(
            result, list(leaves.values()), slopes[:, : result.shape[1]].to(result.dtype)
        )
        assert all(
            grad.dtype == leaf.dtype and grad.shape == leaf.shape
            for grad, leaf in zip(grads, leaves.values(), strict=True)
        )
        return dict(zip(["out", *leaves], [result.detach(), *grads], strict=True))

    most = triton_layer.MOST_PARTS
    triton_layer.MOST_PARTS = parts or most
    try:
        ours, exact = run(triton_layer, False), run(layer, True)
    finally:
        triton_layer.MOST_PARTS = most
    found = {
        name: ((ours[name].double() - value).norm() / value.norm().clamp(min=1e-9)).item()
        for name, value in exact.items()
    }
    if drop:
        kept = draw_keep_mask(derive(keys, 2), width, 0.7)
        there = kept & (gate != 0)  # among many draws one is 0
        found["mask"] = torch.equal(ours["out"] != 0, there) and not ours["gate"][~kept].any()
    return found


def whole(
    dtype,
    dropout,
    device="cpu",
    planner=triton_attention_plan.plan_attention,
    widths=(32, 64),
    wide=False,
):
    """A layer in Triton (or in the version of the plan) against plain torch in float64. Half
    precision uses autocast."""
    torch.manual_seed(0)
    options = dict(width=48, heads=2, max_length=80, dropout=dropout, wide=wide)
    options |= dict(zip(("d_qk", "d_v"), widths, strict=True))
    module = HSTULayer(
        number=3, position_bias=False, time_bias=False, num_time_buckets=1, **options
    )
    lengths = torch.tensor([70, 0, 1, 20], device=device)
    x, slope = torch.randn(2, int(lengths.sum()), 48).to(device)
    keys = derive(5, torch.arange(len(x))).to(device) if dropout else None

    def run(planner, to):
        copied = HSTULayer(
            number=3, position_bias=False, time_bias=False, num_time_buckets=1, **options
        )
        copied.load_state_dict(module.state_dict())
        copied.to(device, to)
        leaf = x.to(to).detach().requires_grad_()
        with torch.autocast(
            device, getattr(torch, dtype), enabled=dtype != "float32" and to == torch.float32
        ):
            out = copied(leaf, lengths, keys, None, None, planner(lengths, 2))
        assert out.dtype == to
        named = dict(copied.named_parameters())
        grads = torch.autograd.grad(out, [leaf, *named.values()], slope.to(out.dtype))
        return dict(zip(["out", "x", *named], [out.detach(), *grads], strict=True))

    ours, exact = run(planner, torch.float32), run(attention_plan.plan_attention, torch.float64)
    return {
        name: ((ours[name].double() - value).norm() / value.norm().clamp(min=1e-9)).item()
        for name, value in exact.items()
    }


WHOLE = {
    "layer": dict(dtype="float32", dropout=0.0),
    "layer, dropout": dict(dtype="float32", dropout=0.25),
    # the interpreter has no products in bfloat16
    "layer, dropout, half precision": dict(dtype="float16", dropout=0.25),
    "layer, heads of other widths": dict(dtype="float32", dropout=0.25, widths=(25, 50)),
    "layer, wide, dropout": dict(dtype="float32", dropout=0.25, wide=True),
}


def fused(
    dtype,
    dropout=0.0,
    biases=False,
    candidates=False,
    layers=1,
    parts=None,
    widths=(32, 64),
    lengths=(20, 0, 1, 40),
    device="cpu",
    apart=False,
    **inputs,
):
    """An encoder with fused layers against plain torch in float64. `apart`: they run one by one."""
    torch.manual_seed(0)
    options = dict(width=48, heads=2, max_length=80, dropout=dropout)
    options |= dict(zip(("d_qk", "d_v"), widths, strict=True))
    options |= dict(layers=layers, position_bias=biases, time_bias=biases, num_time_buckets=16)
    options |= inputs
    module = HSTU(**options)
    lengths = torch.tensor(lengths, device=device)
    counts = torch.tensor([3, 0, 1, 2], device=device) if candidates else None
    x, slope = torch.randn(2, int(lengths.sum()), 48).to(device)
    times = torch.randint(0, 10**6, (len(x),)).to(device) if biases else None
    keys = derive(5, torch.arange(4)).to(device)

    def run(planner, to):
        copied = HSTU(**options)
        copied.load_state_dict(module.state_dict())
        copied.to(device, to)
        copied._plan_attention = lambda lengths, counts, times, host: planner(
            lengths,
            2,
            candidate_counts=counts,
            timestamps=times,
            buckets=16 if biases else 0,
            distances=biases,
        )
        leaf = x.to(to).detach().requires_grad_()
        with torch.autocast(
            device, getattr(torch, dtype), enabled=dtype != "float32" and to == torch.float32
        ):
            if apart and to == torch.float32:
                out, *rest = copied._begin(leaf, lengths, keys, times, counts, None, None)
                for number in range(layers):
                    out = copied._run_layers(out, *rest, layers=slice(number, number + 1))
            else:
                out = copied(leaf, lengths, keys, times, counts)
        assert out.dtype == to
        named = dict(copied.named_parameters())
        grads = torch.autograd.grad(out, [leaf, *named.values()], slope.to(out.dtype))
        assert all(
            grad.dtype == leaf.dtype and grad.shape == leaf.shape
            for grad, leaf in zip(grads, [leaf, *named.values()], strict=True)
        )
        return dict(zip(["out", "x", *named], [out.detach(), *grads], strict=True))

    most = fused_layer.MOST_PARTS
    fused_layer.MOST_PARTS = parts or most
    try:
        ours = run(triton_attention_plan.plan_attention, torch.float32)
        again = run(triton_attention_plan.plan_attention, torch.float32) if parts else ours
    finally:
        fused_layer.MOST_PARTS = most
    exact = run(attention_plan.plan_attention, torch.float64)
    found = {
        name: ((ours[name].double() - value).norm() / value.norm().clamp(min=1e-9)).item()
        for name, value in exact.items()
    }
    return found | {"same bits": all(torch.equal(ours[name], again[name]) for name in ours)}


FUSED = {
    "fused, dropout, parts": dict(dtype="float32", dropout=0.25, parts=2, layers=2),
    "fused, biases, candidates": dict(dtype="float32", biases=True, candidates=True),
    "fused, dropout of inputs alone": dict(
        dtype="float32", candidates=True, input_dropout=0.25, input_scale=3.0
    ),
    "fused, half precision": dict(dtype="float16", dropout=0.25),
    "fused, heads of other widths, one by one": dict(
        dtype="float32", dropout=0.25, layers=2, widths=(25, 50), lengths=(9, 0, 1, 5), apart=True
    ),
    "fused, wide, dropout, parts": dict(
        dtype="float32", dropout=0.25, parts=2, layers=2, candidates=True, wide=True
    ),
    "fused, wide": dict(dtype="float32", candidates=True, layers=2, wide=True),
    "fused, wide, recomputed": dict(dtype="float32", dropout=0.25, checkpoint=True, wide=True),
    "fused, wide, half precision": dict(dtype="float16", dropout=0.25, layers=2, wide=True),
    "fused, wide, heads of other widths": dict(
        dtype="float32", dropout=0.25, layers=2, widths=(25, 35), lengths=(9, 0, 1, 5), wide=True
    ),
}


def encode(dtype, dropout, tokens=21, width=40, device="cpu"):
    """Inputs with the rows of positions and times, against the reference in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return drawn(*shape, dtype="float32", device=device, generator=generator)

    x, tables = draw(tokens, width).to(getattr(torch, dtype)), draw(12, width)
    slope = draw(tokens, width)
    places, buckets = (torch.randint(0, 6, (tokens,), generator=generator) for _ in range(2))
    keys = derive(5, torch.arange(tokens)).to(device)

    def run(module, exact):
        leaves = [
            (leaf.double() if exact else leaf).detach().requires_grad_()
            for leaf in (x, tables[:7], tables[7:])
        ]
        index = places.to(device), buckets.clamp(max=4).to(device)
        options = {"scale": 3.0, "keep": 1 - dropout}
        out = module.add_encodings(*leaves, *index, keys if dropout else None, **options)
        grads = torch.autograd.grad(out, leaves, slope.to(out.dtype))
        assert all(one.dtype == leaf.dtype for one, leaf in zip(grads, leaves, strict=True))
        return [out.detach(), *grads]

    pairs = zip(run(triton_positions, False), run(layer, True), strict=True)
    return {
        str(number): ((mine.double() - value).norm() / value.norm()).item()
        for number, (mine, value) in enumerate(pairs)
    }


ENCODED = {
    "encodings": dict(dtype="float32", dropout=0.0),
    "encodings, dropout": dict(dtype="float32", dropout=0.25),
    "encodings, half precision": dict(dtype="float16", dropout=0.25),
}


def dlrm(dropout):
    """A DLRM in Triton, layers and all, against plain torch in float64."""
    batch = dlrm_cases.make_batch(lengths=(9, 0, 4), counts=(2, 1, 1))

    def run(on_gpu, to):
        model = dlrm_cases.make_model(dropout=dropout).to(to).train()
        with ExitStack() as stack:
            if on_gpu:
                for name in ("layer.runs_triton", "attention.is_on_gpu"):
                    target = f"freescale.kernels.dispatch.{name}"
                    stack.enter_context(mock.patch(target, lambda device: True))
            logits = model._compute_logits(batch)
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(logits.square().sum(), list(named.values()))
        return dict(zip(["logits", *named], [logits.detach(), *grads], strict=True))

    ours, exact = run(True, torch.float32), run(False, torch.float64)
    return {
        name: ((ours[name].double() - value).norm() / value.norm().clamp(min=1e-9)).item()
        for name, value in exact.items()
    }


DLRM = {"dlrm": dict(dropout=0.0), "dlrm, dropout": dict(dropout=0.25)}


def sasrec(dropout, visible=None, device="cpu"):
    """SASRec in Triton, as a run calls it, against plain torch in float64."""
    torch.manual_seed(0)
    sizes = {"width": 48, "layers": 2, "heads": 2, "max_length": 80, "hidden": 40}
    model = SASRec(**sizes, dropout=dropout, visible=visible).train()
    lengths, counts = torch.tensor([70, 0, 1, 20]), torch.tensor([3, 0, 1, 0])
    x, slope = torch.randn(2, int(lengths.sum()), 48)
    keys = derive(5, torch.arange(4))

    def run(on_gpu, to):
        own = copy.deepcopy(model).to(device, to)
        leaf = x.to(device, to).requires_grad_()
        with ExitStack() as stack:
            for name in ("layer.runs_triton", "attention.is_on_gpu"):
                target = f"freescale.kernels.dispatch.{name}"
                stack.enter_context(mock.patch(target, lambda device: on_gpu))
            out = own(leaf, *(part.to(device) for part in (lengths, keys)),
                      candidate_counts=counts.to(device))  # fmt: skip
            grads = torch.autograd.grad(out, [leaf, *own.parameters()], slope.to(out))
        names = ["out", "x", *dict(own.named_parameters())]
        return dict(zip(names, [out.detach(), *grads], strict=True))

    ours, exact = run(True, torch.float32), run(False, torch.float64)
    return {
        name: ((ours[name].double() - value).norm() / value.norm().clamp(min=1e-9)).item()
        for name, value in exact.items()
    }


SASREC = {
    "sasrec": dict(dropout=0.0),
    "sasrec, dropout": dict(dropout=0.25),
    "sasrec, dropout, semi-local": dict(dropout=0.25, visible=Visible(2, 5)),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    found = {case: compare(**options) for case, options in CASES.items()}
    found |= {case: whole(**options) for case, options in WHOLE.items()}
    found |= {case: encode(**options) for case, options in ENCODED.items()}
    found |= {case: dlrm(**options) for case, options in DLRM.items()}
    found |= {case: sasrec(**options) for case, options in SASREC.items()}
    print(json.dumps(found | {case: fused(**options) for case, options in FUSED.items()}))
