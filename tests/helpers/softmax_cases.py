"""Cases of the sampled softmax: its definition, and the Triton kernels against it. As a program:
through the interpreter, as JSON."""

from __future__ import annotations

import json

import torch
from torch.nn import functional as F

from freescale.kernels.softmax import triton
from freescale.kernels.softmax.reference import Negatives

MIXED, LONG = (5, 0, 1, 3), (18, 0, 3)
PER = ("sample", "position", "batch")
# relative, of the loss and of each gradient
LIMITS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}


def draw(
    per, lengths=MIXED, *, k=7, width=8, items=20, dtype=torch.float64, device="cpu",
    weighted=False, log_q=False, whole=False, seed=0,
):  # fmt: skip
    """(leaves, arguments) of a loss. A target is among its negatives, and a row is nobody's.
    `whole`: the negatives of the batch are all rows, in another order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    tokens = int(lengths.sum())

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = {"sample": (len(lengths), k), "position": (tokens, k), "batch": (k,)}[per]
    index = torch.randint(0, items - 1, shape, generator=generator)
    if whole:
        k, shape, index = items, (items,), torch.randperm(items, generator=generator)
    targets = torch.randint(0, items - 1, (tokens,), generator=generator)
    if tokens:
        targets[-1] = index.reshape(-1, k)[{"sample": len(lengths) - 1}.get(per, -1), k // 2]
    leaves = [3 * normal(tokens, width), normal(items, width)]
    options = {
        "temperature": 0.3,
        "weights": torch.arange(tokens) % 3 / 2 if weighted else None,
        "targets_log_q": normal(tokens).float() if log_q else None,
    }
    negatives = Negatives(
        index.to(device), per, normal(*shape).float().to(device) if log_q else None
    )
    return (
        [leaf.to(device, dtype).requires_grad_() for leaf in leaves],
        (targets.to(device), negatives, lengths.to(device)),
        {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()},
    )


def define(
    outputs, rows, targets, negatives, lengths, *,
    temperature, normalize, weights=None, targets_log_q=None,
):  # fmt: skip
    """The definition, with all logits in memory: [tokens, 1 + K]."""

    def spread(x):  # [...] of the negatives -> [tokens, K]
        if negatives.per == "sample":
            return torch.repeat_interleave(x, lengths, dim=0)
        return x.expand(len(targets), -1) if negatives.per == "batch" else x

    index = torch.cat([targets[:, None], spread(negatives.index)], 1)
    if normalize:
        outputs, rows = F.normalize(outputs, dim=1), F.normalize(rows, dim=1)
    logits = (rows[index] * outputs[:, None]).sum(2) / temperature
    if negatives.log_q is not None:
        logits = logits - torch.cat([torch.zeros_like(logits[:, :1]), spread(negatives.log_q)], 1)
    if targets_log_q is not None:
        logits = logits - F.pad(targets_log_q[:, None], (0, negatives.count))
    absent = index == targets[:, None]
    absent[:, 0] = False
    logits = logits.masked_fill(absent, -torch.inf)
    losses = logits.logsumexp(1) - logits[:, 0]
    return (losses if weights is None else losses * weights).sum()


def differentiate(function, leaves, arguments, options, slope=1.0):
    """[loss, gradient of outputs, gradient of rows], the loss times `slope`."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    loss = function(*leaves, *arguments, **options)
    return [loss.detach(), *torch.autograd.grad(loss * slope, leaves)]


def compare(per, *, device="cpu", dtype="float32", normalize=True, slope=0.7, **options):
    """How far the Triton kernels are from the definition in float64."""
    kind = getattr(torch, dtype)
    leaves, arguments, options = draw(per, dtype=torch.float32, device=device, **options)
    options["normalize"] = normalize
    leaves[0] = leaves[0].detach().to(kind)
    exact = differentiate(define, [leaf.double() for leaf in leaves], arguments, options, slope)
    found = differentiate(triton.sampled_softmax, leaves, arguments, options, slope)
    same = device == "cpu" or all(
        torch.equal(a, b)
        for _ in range(2)
        for a, b in zip(
            found, differentiate(triton.sampled_softmax, leaves, arguments, options, slope)
        )
    )
    errors = {
        name: float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) if b.numel() else 0.0
        for name, a, b in zip(("loss", "outputs", "rows"), found, exact, strict=True)
    }
    types = [t.dtype for t in found] == [torch.float32, kind, torch.float32]
    return errors | {"same bits": same, "dtypes": types}


# The interpreter multiplies no bfloat16.
CASES = {
    **{f"{per}, float16": {"per": per, "dtype": "float16"} for per in PER},
    **{f"{per}, raw": {"per": per, "normalize": False, "k": 3} for per in PER},
    **{f"{per}, empty": {"per": per, "lengths": [0, 0]} for per in PER},
    **{f"{per}, one": {"per": per, "lengths": [1], "k": 1} for per in PER},
    # several tiles of tokens, columns and negatives, none full; rows with many entries
    **{
        f"{per}, tiles, weights and log-q": {
            "per": per, "lengths": LONG, "width": 20, "k": 18, "items": 9, "weighted": True,
            "log_q": True,
        }
        for per in PER
    },
    "batch, all rows": {"per": "batch", "lengths": LONG, "items": 37, "whole": True},
    "many samples": {"per": "sample", "lengths": [1, 2] * 5, "k": 2, "items": 4},
}  # fmt: skip


def shrink():
    """Makes the tiles small, so that small cases have several of everything."""
    triton.NARROW = triton.FLOAT32 = triton.SoftmaxLaunch(16, 16, 16, 16, 32, (4, 4, 4))
    triton.SAMPLE_BLOCK, triton.ENTRY_CHUNK, triton.SEARCH_BLOCK = 4, 16, 8
    triton.POSITION_ELEMENTS, triton.ENTRY_ELEMENTS = 1024, 512
    triton.SHORTEST_CHUNK = triton.LONGEST_CHUNK = 16


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    shrink()
    print(json.dumps({name: compare(**case) for name, case in CASES.items()}))
