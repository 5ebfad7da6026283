"""Measures the attention kernels. Times are of the device, for equal lengths, which SDPA and
FlexAttention take without padding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from freescale.kernels.attention import reference, softmax, triton, triton_plan
from freescale.kernels.attention.plan import plan_attention
from freescale.kernels.attention.triton import WeightDropout
from freescale.visible import Visible
from freescale_bench.common.markdown import format_rows
from freescale_bench.common.ranks import get_gpu_name
from freescale_bench.common.results import Destination, Target, make_claims, write
from freescale_bench.kernels.bench import prepare_device
from freescale_bench.kernels.measure import Bench, Call
from freescale_bench.kernels.table import HEAD, format_row

WAYS, BUCKETS, DROPOUT, LIMIT = ("forward", "backward"), 128, 0.1, 1e-5
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "samples": 4, "length": 16_384, "heads": 4, "widths": (128, 64),
        "visible": Visible(64, 1024), "checked": 1500, "checked_visible": Visible(64, 256),
        # samples, length, heads of 128: the longest histories of two shapes of `bench train`
        "biased": {"long": (4, 16_384, 4), "wide": (32, 4096, 8)},
    },
    "cpu": {
        "samples": 2, "length": 130, "heads": 2, "widths": (32,), "visible": Visible(3, 20),
        "checked": 140, "checked_visible": Visible(3, 40),
        "biased": {"long": (1, 70, 2), "wide": (2, 40, 2)},
    },
}  # fmt: skip
BACKENDS = {
    "SDPA FLASH": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}


class _Inputs:
    """Queries, keys, values and a gradient of samples of one length."""

    def __init__(self, bench: Bench, samples: int, length: int, heads: int, width: int) -> None:
        self.bench, self.heads, self.width, self.samples = bench, heads, width, samples
        self.lengths = torch.full((samples,), length, device=bench.device)
        tokens = samples * length
        draw: Callable[[], Tensor] = lambda: bench.draw(tokens, heads, width, dtype=bench.narrow)  # noqa: E731
        self.leaves = [draw().requires_grad_() for _ in range(3)]
        self.grad = draw()
        self.work = 4 * heads * width * samples * float(length) ** 2 / 2 / 1e12

    def as_dense(self) -> tuple[list[Tensor], Tensor]:
        """[samples, heads, length, width], as SDPA takes them."""

        def turn(x: Tensor) -> Tensor:
            by_sample = x.detach().view(self.samples, -1, self.heads, self.width)
            return by_sample.transpose(1, 2).contiguous()

        return [turn(x).requires_grad_() for x in self.leaves], turn(self.grad)

    def measure(
        self, arm: str, call: Call, leaves: Sequence[Tensor], grad: Tensor, what: str
    ) -> dict[str, float]:
        """Milliseconds of forward and backward. Rates count the full lower triangle."""
        out = call()
        backward: Call = lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)  # noqa: E731
        found = {}
        for way, run, work in zip(WAYS, (call, backward), (1, 2.5), strict=True):
            with torch.set_grad_enabled(way == "backward"):
                case = f"{what}, {way}, {arm}"
                row = self.bench.measure("attention", case, run, teraflops=work * self.work)
            row |= {"arm": arm, "way": way, "what": what}
            found[way] = row["ms"]["median"]
        return found


def measure_softmax(bench: Bench, size: dict[str, Any]) -> dict[str, float]:
    """Softmax attention without and with keyed dropout, against torch's."""
    figures: dict[str, float] = {}
    for width in size["widths"]:
        inputs = _Inputs(bench, size["samples"], size["length"], size["heads"], width)
        what = f"softmax, {inputs.samples} x {size['length']:,}, {inputs.heads} heads of {width}"
        keys = torch.arange(inputs.grad.shape[0], device=bench.device)
        dropout = WeightDropout(keys, 0, 1 - DROPOUT)
        times = {
            "ours": _measure_own_softmax(inputs, "ours", what),
            "dropped": _measure_own_softmax(inputs, "ours, keyed dropout", what, dropout=dropout),
        }
        leaves, grad = inputs.as_dense()
        for arm, call in _list_peers(bench, leaves):
            try:
                times[arm] = inputs.measure(arm, call, leaves, grad, what)
            except RuntimeError as error:  # a backend may not take these inputs
                print(f"{what}: {arm}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        for way in WAYS:
            sdpa = {arm: found[way] for arm, found in times.items() if arm in BACKENDS}
            ours = times["ours"][way]
            figures[f"{way} {width}, of SDPA's best"] = min(sdpa.values()) / ours
            figures[f"{way} {width}, dropout, times without"] = times["dropped"][way] / ours
            if "SDPA FLASH" in sdpa:
                figures[f"{way} {width}, of SDPA FLASH"] = sdpa["SDPA FLASH"] / ours
    return figures


def _measure_own_softmax(
    inputs: _Inputs, arm: str, what: str, *, dropout: WeightDropout | None = None,
    visible: Visible | None = None,
) -> dict[str, float]:  # fmt: skip
    plan = triton_plan.plan_attention(inputs.lengths, inputs.heads, visible=visible)
    q, k, v = inputs.leaves
    call: Call = lambda: triton.softmax_attention(  # noqa: E731
        q, k, v, plan, alpha=inputs.width**-0.5, dropout=dropout
    )
    return inputs.measure(arm, call, inputs.leaves, inputs.grad, what)


def _list_peers(bench: Bench, leaves: Sequence[Tensor]) -> Iterator[tuple[str, Call]]:
    cuda, (q, k, v) = bench.device.type == "cuda", leaves
    for arm, backend in BACKENDS.items():
        if cuda == (arm != "SDPA math"):

            def attend(backend: SDPBackend = backend) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            yield arm, attend
    if cuda:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        length = q.shape[2]
        mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, length, length, device="cuda"
        )
        compiled = torch.compile(flex_attention)
        yield "FlexAttention", lambda: compiled(q, k, v, block_mask=mask)


def measure_biases(bench: Bench, size: dict[str, Any]) -> dict[str, float]:
    """HSTU's attention with biases by position and time, over that without."""
    figures: dict[str, float] = {}
    for name, (samples, length, heads) in size["biased"].items():
        inputs = _Inputs(bench, samples, length, heads, size["widths"][0])
        times = torch.randint(0, 3000, (samples * length,), device=bench.device).cumsum(0)
        biases = [(0.1 * bench.draw(n)).requires_grad_() for n in (length + 1, BUCKETS + 1)]
        found = {}
        for arm, own in (("without biases", (None, None)), ("both biases", biases)):
            found[arm] = _measure_hstu(inputs, arm, f"{name}, HSTU", own, times)
        for way in WAYS:
            pair = (found[arm][way] for arm in ("both biases", "without biases"))
            figures[f"{way} {name}, biases"] = next(pair) / next(pair)
    return figures


def _measure_hstu(
    inputs: _Inputs, arm: str, what: str, biases: Sequence[Tensor | None] = (None, None),
    times: Tensor | None = None, visible: Visible | None = None,
) -> dict[str, float]:  # fmt: skip
    biased = biases[0] is not None
    plan = triton_plan.plan_attention(
        inputs.lengths, inputs.heads, timestamps=times if biased else None,
        buckets=BUCKETS if biased else 0, distances=biased, visible=visible,
    )  # fmt: skip
    q, k, v = inputs.leaves
    leaves = [q, k, v, *(bias for bias in biases if bias is not None)]
    call: Call = lambda: triton.hstu_attention(  # noqa: E731
        q, k, v, inputs.lengths, scale_length=int(inputs.lengths[0]),
        alpha=inputs.width**-0.5, position_bias=biases[0], time_bias=biases[1],
        timestamps=times if biased else None, plan=plan,
    )  # fmt: skip
    return inputs.measure(arm, call, leaves, inputs.grad, what)


def measure_semi_local(bench: Bench, size: dict[str, Any]) -> dict[str, float]:
    """Attention to the first and last keys, over that to all, and its error."""
    figures: dict[str, float] = {}
    visible = size["visible"]
    inputs = _Inputs(bench, size["samples"], size["length"], size["heads"], size["widths"][0])
    what = f"first {visible.first}, last {visible.last:,} of {size['length']:,}"
    for kind in ("SiLU", "softmax"):
        times = {}
        measure: Any = _measure_hstu if kind == "SiLU" else _measure_own_softmax
        for arm, seen in (("full", None), ("semi-local", visible)):
            times[arm] = measure(inputs, arm, f"{what}, {kind}", visible=seen)
        for way in WAYS:
            figures[f"{way} semi-local, {kind}"] = times["full"][way] / times["semi-local"][way]
        figures[f"error, {kind}"] = _measure_error(bench, size, kind)
    return figures


def _measure_error(bench: Bench, size: dict[str, Any], kind: str) -> float:
    """The largest relative error of the output and the gradients against the masked reference in
    float64, in float32."""
    visible, length = size["checked_visible"], size["checked"]
    lengths = torch.tensor([length, 1, length // 3], device=bench.device)
    drawn = [bench.draw(int(lengths.sum()), 2, 64) for _ in range(4)]

    def run(dtype: torch.dtype, ours: bool) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in drawn[:3]]
        make: Any = triton_plan.plan_attention if ours else plan_attention
        if kind == "softmax" and not ours:
            make = softmax.plan_softmax_attention
        plan = make(lengths, 2, visible=visible)
        module: Any = triton if ours else softmax if kind == "softmax" else reference
        if kind == "softmax":
            out = module.softmax_attention(*leaves, plan, alpha=0.125)
        else:
            out = module.hstu_attention(
                *leaves, lengths, scale_length=length, alpha=0.125, plan=plan
            )
        return [out.detach(), *torch.autograd.grad(out, leaves, drawn[3].to(dtype))]

    pairs = zip(run(torch.float32, True), run(torch.float64, False), strict=True)
    return max(float((mine.double() - exact).norm() / exact.norm()) for mine, exact in pairs)


def list_targets(size: dict[str, Any]) -> Iterator[Target]:
    width = size["widths"][0]
    shape = f"{size['samples']} x {size['length']:,}, {size['heads']} heads of {width}"
    for way in WAYS:
        text = f"softmax {way}, {shape}: speed, of SDPA's FLASH backend"
        yield Target(f"{way} {width}, of SDPA FLASH", text, 1.2, "times")
    for way, least in zip(WAYS, (0.9, 0.8), strict=True):
        text = f"softmax {way}, {shape}: speed, of SDPA's best backend"
        yield Target(f"{way} {width}, of SDPA's best", text, least, "times")
    for kind in ("SiLU", "softmax"):
        for way in WAYS:
            text = f"semi-local {kind} {way} at {size['length']:,}: speed, of full attention"
            yield Target(f"{way} semi-local, {kind}", text, 5, "times")
        text = f"semi-local {kind}, float32: error against the masked reference"
        yield Target(f"error, {kind}", text, LIMIT, "", at_least=False)


MEASURES = {
    "softmax": measure_softmax,
    "biases": measure_biases,
    "semi-local": measure_semi_local,
}


def measure_attention(device: str, parts: Sequence[str]) -> tuple[Bench, dict[str, float]]:
    prepare_device(device)
    torch.manual_seed(0)
    bench, figures = Bench(device), dict[str, float]()
    for part in parts:
        figures |= MEASURES[part](bench, SIZES[device])
        if device == "cuda":
            torch.cuda.empty_cache()
    return bench, figures


def bench_attention(device: str, parts: Sequence[str], keep: bool, to: Destination) -> None:
    bench, figures = measure_attention(device, parts)
    print(format_rows(HEAD, [format_row(row) for row in bench.rows]))
    for name, value in figures.items():
        print(f"{name}: {value:.3g}")
    claims = make_claims(list_targets(SIZES[device]), figures)
    if not keep:
        print(f"{len(bench.rows)} rows and {len(claims)} claims, not written")
        return
    write(
        "attention", get_gpu_name(), "freescale bench attention", bench.rows, claims, ["triton"],
        to=to, ceilings=bench.ceilings, figures=figures,
    )  # fmt: skip
