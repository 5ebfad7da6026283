"""Cases for attention to summaries: hard lengths, the definition pair by pair, and the errors of
the Triton kernels. As a program: all cases, through the interpreter."""

from __future__ import annotations

import json

import numpy as np
import torch

from freescale.kernels.attention import reference as attention
from freescale.kernels.attention import triton as triton_attention
from freescale.kernels.summary_attention import reference as summary_attention
from freescale.kernels.summary_attention import triton as triton_summary_attention
from freescale.kernels.summary_attention.plan import SummaryPlan
from freescale.models.segments.arrangement import arrange_rows
from freescale.segments import Segments

# events and candidates of each sample, and known earlier segments
SAMPLES = {
    "mixed": ([0, 1, 5, 6, 23, 10, 4], [0, 1, 0, 1, 3, 0, 4], [0, 0, 0, 0, 0, 0, 0]),
    "known": ([0, 1, 5, 6, 13, 10, 4], [0, 1, 0, 1, 3, 0, 4], [2, 0, 1, 0, 3, 1, 2]),
    "short": ([1, 2, 4], [0, 1, 0], [0, 0, 0]),
    "empty": ([0, 0], [0, 0], [0, 1]),
}
CASES = {
    "mixed": dict(samples="mixed", segment=5, tokens=2, heads=2),
    "known": dict(samples="known", segment=5, tokens=2),
    "one token": dict(samples="mixed", segment=3, tokens=1),
    "as many tokens as events": dict(samples="mixed", segment=3, tokens=3),
    "short": dict(samples="short", segment=5, tokens=2),
    "empty": dict(samples="empty", segment=5, tokens=2),
    "more than a tile": dict(samples=([150, 64, 71], [3, 0, 70], [0, 1, 20]), segment=17, tokens=6),
    "half precision": dict(samples="known", segment=5, tokens=2, dtype="float16"),
    "different widths": dict(samples="mixed", segment=4, tokens=2, widths=(32, 64)),
}


def visible(length, candidates, segments, known=0):
    """[rows, known summaries + rows] bool of one sample, straight from the definition in
    `freescale.segments`."""
    rows = []  # (segment, kind) in order
    history = length - candidates
    for event in range(history):
        rows.append((event // segments.length, "event"))
        if (event + 1) % segments.length == 0:
            rows += [(event // segments.length, "summary")] * segments.tokens
    rows += [(history // segments.length, "candidate")] * candidates
    keys = [(-1, "summary")] * (known * segments.tokens) + rows
    shift = len(keys) - len(rows)
    mask = np.zeros((len(rows), len(keys)), bool)
    for i, (own, _) in enumerate(rows):
        for j, (other, kind) in enumerate(keys):
            if j - shift == i:
                mask[i, j] = True
            elif j - shift < i and kind != "candidate":
                mask[i, j] = other == own or kind == "summary"
    return mask


def drawn(samples, segment, tokens, heads=1, widths=(32, 32), device="cpu", dtype=torch.float64):
    """The rows of a case with their plan, and q, k, v of the rows and k, v of the known
    summaries."""
    lengths, counts, known = SAMPLES[samples] if isinstance(samples, str) else samples
    segments = Segments(segment, tokens)
    rows = arrange_rows(
        segments,
        torch.tensor(lengths, device=device),
        torch.tensor(counts, device=device),
        None,
        np.array(known),
    )
    generator = torch.Generator().manual_seed(0)
    total, old = rows.plan.rows, sum(known) * tokens

    def leaf(n, width):
        return torch.randn(n, heads, width, generator=generator).to(device, dtype).requires_grad_()

    d_qk, d_v = widths
    return rows, [
        leaf(total, d_qk),
        leaf(total, d_qk),
        leaf(total, d_v),
        leaf(old, d_qk),
        leaf(old, d_v),
    ]


def segmented(rows, q, k, v, old_k, old_v, twins, scale_length=50, alpha=0.2, **biases):
    """The attention of an encoder's layer: parts as samples, plus attention to summaries. `twins`:
    the two functions."""
    plain, of_summaries = twins
    times = {"timestamps": biases.pop("timestamps")} if "timestamps" in biases else {}
    out = plain(
        q,
        k,
        v,
        rows.parts,
        scale_length=scale_length,
        alpha=alpha,
        candidate_counts=rows.candidate_counts,
        **biases,
        **times,
    )
    plan = rows.plan
    owners = [
        np.repeat(np.arange(len(n)), n * plan.segments.tokens) for n in (plan.known, plan.closed)
    ]
    order = torch.from_numpy(np.argsort(np.concatenate(owners), kind="stable")).to(q.device)
    keys, values = (
        torch.cat([old, x[rows.summaries]])[order] for old, x in ((old_k, k), (old_v, v))
    )
    fresh = SummaryPlan(plan.segments, plan.lengths, plan.closed, plan.known)
    return out + of_summaries(q, keys, values, fresh, scale_length=scale_length, alpha=alpha)


REFERENCE = attention.hstu_attention, summary_attention.summary_attention
TRITON = triton_attention.hstu_attention, triton_summary_attention.summary_attention


def compare(samples, segment, tokens, dtype="float32", widths=(32, 32), heads=1, device="cpu"):
    """Relative errors of the output and of all gradients against the references in float64, by
    name."""
    rows, leaves = drawn(samples, segment, tokens, heads, widths, device)
    weight = torch.randn(
        leaves[2].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(device)

    def run(twins, kind):
        inputs = [x.detach().to(getattr(torch, dtype)).to(kind).requires_grad_() for x in leaves]
        out = segmented(rows, *inputs, twins)
        return [
            out.detach(),
            *torch.autograd.grad((out * weight.to(getattr(torch, dtype)).to(kind)).sum(), inputs),
        ]

    ours, exact = run(TRITON, getattr(torch, dtype)), run(REFERENCE, torch.float64)
    names = ("out", "q", "k", "v", "known k", "known v")
    return {
        n: ((a.double() - b).norm() / b.norm().clamp(min=1e-9)).item()
        for n, a, b in zip(names, ours, exact, strict=True)
    }


def isolation(device="cpu"):
    """Whether the samples before and after one of NaN stay finite, although their tiles overlap
    it."""
    rows, leaves = drawn(
        ([40, 40, 40], [0, 0, 0], [1, 1, 1]), 9, 3, device=device, dtype=torch.float32
    )
    size, old = rows.plan.lengths[0], 3
    with torch.no_grad():
        for x, n in zip(leaves, (size, size, size, old, old), strict=True):
            x[n : 2 * n] = torch.nan
    out = segmented(rows, *leaves, TRITON)
    weight = torch.ones_like(out)
    weight[size : 2 * size] = torch.nan
    results = [out.detach(), *torch.autograd.grad(out, leaves, weight)]
    cuts = (size, size, size, size, old, old)
    return {
        "before": all(bool(x[:n].isfinite().all()) for x, n in zip(results, cuts, strict=True)),
        "after": all(bool(x[2 * n :].isfinite().all()) for x, n in zip(results, cuts, strict=True)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps(
            {case: compare(**options) for case, options in CASES.items()}
            | {"isolation": isolation()}
        )
    )
