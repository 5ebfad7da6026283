"""Kernels in C for small batches on a CPU, against the operations of torch."""

from __future__ import annotations

import pytest
import torch

from freescale.batch import HostSizes
from freescale.kernels import native as bindings
from freescale.kernels.attention import native_plan as attention_plan
from freescale.kernels.attention import plan as plain_plan
from freescale.kernels.layer import native as fused_layer
from freescale.kernels.row_updates import native as row_updates
from freescale.kernels.row_updates import reference as plain_updates
from freescale.kernels.softmax import native as native_softmax
from freescale.kernels.softmax import reference as softmax
from freescale.models import HSTU
from freescale.visible import Visible

LENGTHS = torch.tensor([3, 0, 7, 1, 12])
TOKENS = int(LENGTHS.sum())


def _differentiate(model, x, candidates):
    """Outputs, and the gradients of x and all parameters."""
    generator = torch.Generator().manual_seed(1)
    times = torch.randint(0, 10**7, (TOKENS,), generator=generator).sort().values
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x, LENGTHS, torch.arange(5) + 7, times, candidates)
    (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def test_the_kernels_are_there():
    assert bindings.load_native() is not None, bindings.explain_missing_native()


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("candidates", [None, torch.tensor([1, 0, 3, 0, 2])])
@pytest.mark.parametrize("dropout", [0.3, 0.0])
def test_layers_are_those_of_plain_torch(biases, candidates, dropout, monkeypatch):
    torch.manual_seed(0)
    options = {"position_bias": biases, "time_bias": biases, "dropout": dropout}
    # a width that is no multiple of a vector's, and heads of another width
    model = HSTU(width=30, layers=2, heads=3, d_qk=5, d_v=7, max_length=20, **options)
    x = torch.randn(TOKENS, 30)
    ran = []
    apply = fused_layer._Layers.apply
    monkeypatch.setattr(fused_layer._Layers, "apply", lambda *own: ran.append(1) or apply(*own))
    mine = _differentiate(model, x, candidates)
    again = _differentiate(model, x, candidates)
    model.checkpoint = True
    recomputed = _differentiate(model, x, candidates)
    model.checkpoint = False
    assert len(ran) >= 3
    assert all(map(torch.equal, mine, again)) and all(map(torch.equal, mine, recomputed))
    monkeypatch.setattr(attention_plan, "load_native", lambda: None)
    count = len(ran)
    for own, plain in zip(mine, _differentiate(model, x, candidates), strict=True):
        assert (own - plain).abs().max() <= 5e-6 * plain.abs().max()
    assert len(ran) == count


@pytest.mark.parametrize("visible", [None, Visible(0, 3), Visible(3, 2), Visible(2, 300)])
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("candidates", [None, torch.tensor([1, 0, 3, 0, 2])])
def test_the_plan_is_that_of_plain_torch(candidates, timed, visible):
    generator = torch.Generator().manual_seed(1)
    times = (torch.rand(TOKENS, generator=generator) * 26).exp().long()  # in no order
    options = {
        "candidate_counts": candidates,
        "timestamps": times if timed else None,
        "buckets": 80 if timed else 0,
        "distances": True,
        "visible": visible,
    }
    mine = attention_plan.plan_attention(LENGTHS, 2, 1 << 15, **options)
    plain = plain_plan.plan_attention(LENGTHS, 2, **options)
    assert mine is not None and plain.pairs is not None
    for name in ("query", "key", "distance"):
        assert torch.equal(getattr(mine.pairs, name), getattr(plain.pairs, name))
    if timed:
        assert torch.equal(mine.bucket, plain.bucket) and mine.bucket.unique().numel() > 5
    for name in ("tokens", "heads", "longest_history", "longest_distance", "buckets", "timed"):
        assert getattr(mine, name) == getattr(plain, name)


def test_plans_that_are_not_for_a_list_are_left_to_plain_torch():
    pairs = int((LENGTHS * (LENGTHS + 1) // 2).sum())
    plan = attention_plan.plan_attention
    assert plan(LENGTHS, 2, 2 * pairs) is not None and plan(LENGTHS, 2, 2 * pairs - 1) is None
    for wrong in (LENGTHS - 1, LENGTHS.float(), LENGTHS[None]):
        assert plan(wrong, 2, 1 << 15) is None
    assert plan(LENGTHS, 2, 1 << 15, candidate_counts=LENGTHS + 1) is None
    assert plan(LENGTHS, 2, 1 << 15, timestamps=torch.arange(TOKENS - 1)) is None
    other = HostSizes(LENGTHS[:-1])
    assert plan(LENGTHS, 2, 1 << 15, host=other) is None


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("extras", [True, False])
@pytest.mark.parametrize("per", ["batch", "sample", "position"])
def test_softmax_is_that_of_plain_torch(normalize, extras, per):
    """As close to float64 as plain torch in float32 is: logits here are up to some tens, and the
    error of their sums depends on the order, which depends on the processor."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(40, 13, generator=generator)
    outputs = torch.randn(TOKENS, 13, generator=generator)
    shape = {"batch": (25,), "sample": (len(LENGTHS), 25), "position": (TOKENS, 25)}[per]
    targets, index = (
        torch.randint(0, 40, size, generator=generator) for size in ((TOKENS,), shape)
    )
    index[..., 3] = targets[0]
    options: dict[str, object] = {"temperature": 0.3, "normalize": normalize}
    log_q = None
    if extras:
        log_q = torch.randn(shape, generator=generator)
        options["weights"] = torch.rand(TOKENS, generator=generator)
        options["targets_log_q"] = torch.randn(TOKENS, generator=generator)
    negatives = softmax.Negatives(index, per, log_q)
    assert native_softmax.fits(outputs, rows, negatives)
    found = []
    for kernel, dtype in (
        (native_softmax, torch.float32), (softmax, torch.float32), (softmax, torch.float64)
    ):  # fmt: skip
        own = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (outputs, rows)]
        loss = kernel.sampled_softmax(*own, targets, negatives, LENGTHS, **options)
        (2 * loss).backward()
        found.append((loss.detach(), own[0].grad, own[1].grad))
    for mine, plain, exact in zip(*found, strict=True):
        error, usual = ((each - exact).abs().max() for each in (mine, plain))
        assert error <= 4 * usual + 1e-6 * exact.abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("width", [13, 64])
def test_adam_of_rows_is_that_of_plain_torch(width):
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(3, 50, width, generator=generator)
    start[2].abs_()
    found = []
    for module in (row_updates, plain_updates):
        tables = start.clone().unbind()
        for step in (1, 2, 700):
            rows = torch.randperm(50, generator=generator.manual_seed(step))[:31]
            gradients = torch.randn(31, width, generator=generator)
            options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "step": step}
            # in parts, as schedules do
            for part in (slice(0, 7), slice(7, 31)):
                module.adam(*tables, rows[part], gradients[part], **options)
        found.append(tables)
    for mine, plain, before in zip(*found, start, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
        assert not torch.equal(mine, before)


@pytest.mark.parametrize("width", [13, 64])
def test_rowwise_adagrad_of_rows_is_that_of_plain_torch(width):
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(50, width, generator=generator), torch.rand(50, generator=generator)
    found = []
    for module in (row_updates, plain_updates):
        weight, total = (each.clone() for each in start)
        for step in range(3):
            rows = torch.randperm(50, generator=generator.manual_seed(step))[:31]
            gradients = torch.randn(31, width, generator=generator)
            for part in (slice(0, 7), slice(7, 31)):
                module.rowwise_adagrad(weight, total, rows[part], gradients[part], lr=0.1, eps=1e-8)
        found.append((weight, total))
    for mine, plain, before in zip(*found, start, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
        assert not torch.equal(mine, before)


@pytest.mark.parametrize("threads", [3, 8])
def test_threads_change_no_bit_of_an_update(threads, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    tables = torch.rand(3, 4000, 65, generator=generator)
    rows = torch.randperm(4000, generator=generator)[:3001]
    gradients = torch.randn(3001, 65, generator=generator)
    found = []
    for count in (1, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        adam, adagrad, whole = (tables.clone().unbind() for _ in range(3))
        options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
        row_updates.adam(*adam, rows, gradients, step=2, **options)
        total = adagrad[1][:, 0].contiguous()
        row_updates.rowwise_adagrad(adagrad[0], total, rows, gradients, lr=0.1, eps=1e-8)
        lists = [[each.clone()] for each in (whole[0], tables[1], *whole[1:], torch.ones(()))]
        assert row_updates.adam_tensors(*lists, weight_decay=0.1, **options)
        found.append([*adam, adagrad[0], total, *(each for one in lists for each in one)])
    for alone, shared in zip(*found, strict=True):
        assert torch.equal(alone, shared)
    assert not torch.equal(found[0][0], tables[0])


def test_what_is_no_number_stays_none():
    rows, index = torch.randn(9, 4), torch.arange(5)
    outputs = torch.randn(3, 4)
    outputs[1, 2] = torch.nan
    negatives = softmax.Negatives(index, "batch")
    loss = native_softmax.sampled_softmax(
        outputs, rows, torch.arange(3) + 5, negatives, torch.tensor([3]), temperature=0.1,
        normalize=True,
    )  # fmt: skip
    assert loss.isnan()
