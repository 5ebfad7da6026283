"""The Triton operations of a layer on a GPU against the reference in float64, and steps of both
models that read nothing from the device."""

from __future__ import annotations

import pytest
import torch
from helpers import dlrm_cases, layer_cases

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.kernels.attention import plan as attention_plan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.layer.triton import gated_norm, layer_norm, silu_split
from freescale.models import HSTU, Ranking, Retrieval, SASRec
from freescale.random import derive, draw_keep_mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def poisoned():
    """Uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", layer_cases.LIMITS)
@pytest.mark.parametrize(
    "tokens, width",
    [*layer_cases.SIZES, (5000, 128), (70_001, 256), (999, 1024), (333, 1000), (77, 4096)],
)
@pytest.mark.parametrize(
    "piece", ["layer_norm", "swish_norm", "gated_norm", "dropout", "silu_split"]
)
def test_equals_the_plain_one(poisoned, piece, tokens, width, dtype):
    found = layer_cases.compare(piece, tokens, width, dtype, device="cuda", sliced=tokens % 2 == 1)
    limit = layer_cases.LIMITS[dtype]
    assert all(
        value < limit if isinstance(value, float) else value is True for value in found.values()
    ), found


def test_float32_to_bfloat16(poisoned):
    found = layer_cases.compare("layer_norm", 999, 512, "float32", out="bfloat16", device="cuda")
    assert all(value < 1e-2 for value in found.values()), found


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_is_as_exact_as_the_plain_one(poisoned, dtype, dropout):
    ours = layer_cases.whole(dtype, dropout, "cuda")
    if dtype == "float32":
        assert all(error < 1e-5 for error in ours.values()), ours
    else:
        eager = layer_cases.whole(dtype, dropout, "cuda", planner=attention_plan.plan_attention)
        assert all(error < 1.3 * eager[name] + 2e-3 for name, error in ours.items()), (ours, eager)


def test_the_same_bits_every_time():
    torch.manual_seed(0)
    x, gate, slope = torch.randn(3, 50_000, 512, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, 512, device="cuda")
    keys = derive(1, torch.arange(50_000)).cuda()
    runs = []
    for _ in range(3):
        leaves = [leaf.detach().requires_grad_() for leaf in (x, gate, weight, bias)]
        out = gated_norm(*leaves, 1e-6, torch.bfloat16, keys=keys, stream=1, keep=0.8)
        normed = layer_norm(leaves[0], *leaves[2:], 1e-6, torch.bfloat16)
        grads = torch.autograd.grad((out, normed), leaves, (slope, slope))
        runs.append([out.detach(), *grads])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    assert torch.equal(
        runs[0][0] != 0, draw_keep_mask(derive(keys, 1), 512, 0.8) & (runs[0][0] != 0)
    )


def test_more_elements_than_32_bits_can_count():
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    width, last = 1024, 50
    tokens = 2**31 // width + 70
    weight, bias = torch.randn(2, width, device="cuda")
    x, gate, slope = (
        torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    keys = derive(1, torch.arange(tokens, device="cuda"))
    options = {"eps": 1e-6, "dtype": torch.bfloat16, "stream": 4, "keep": 0.5}

    def run(*rows):
        x, gate, slope, keys = rows
        leaves = [x.detach().requires_grad_(), gate.detach().requires_grad_()]
        out = gated_norm(*leaves, weight, bias, keys=keys, **options)
        found = [
            out.detach()[-last:],
            *(grad[-last:] for grad in torch.autograd.grad(out, leaves, slope)),
        ]
        del out
        parts = silu_split(leaves[0], [256, 256, 256, 256])
        return [*found, torch.autograd.grad(parts, leaves[0], slope.split(256, 1))[0][-last:]]

    expected = run(*(rows[-last:].contiguous() for rows in (x, gate, slope, keys)))
    assert all(
        torch.equal(ours, alone)
        for ours, alone in zip(run(x, gate, slope, keys), expected, strict=True)
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_layers_equal_the_plain_ones(poisoned, dtype, recompute):
    found = layer_cases.fused(
        dtype, dropout=0.25, candidates=True, layers=3, wide=True, checkpoint=recompute,
        device="cuda",
    )  # fmt: skip
    limit = 1e-5 if dtype == "float32" else 3e-2
    assert found.pop("same bits") and all(error < limit for error in found.values()), found


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encodings_equal_the_plain_ones(poisoned, dtype, dropout):
    found = layer_cases.encode(dtype, dropout, tokens=5001, width=512, device="cuda")
    assert all(error < layer_cases.LIMITS[dtype] for error in found.values()), found


@pytest.mark.parametrize("case", layer_cases.SASREC)
def test_sasrec_equals_the_plain_one(poisoned, case):
    found = layer_cases.sasrec(**layer_cases.SASREC[case], device="cuda")
    assert all(error < 1e-4 for error in found.values()), found


# ---- nothing is read from the device


def test_a_step_of_a_dlrm_reads_nothing_from_the_device():
    model = dlrm_cases.make_model(dropout=0.2).float().train()
    expected = model.eval()._compute_logits(dlrm_cases.make_batch(seed=0))
    model.train().cuda()
    for number in range(3):
        there = dlrm_cases.make_batch(seed=number % 2).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        if number == 2:  # by then everything is compiled
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                sum(model(there).values()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    found = model.eval()._compute_logits(dlrm_cases.make_batch(seed=0).to("cuda"))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths, counts = (torch.randint(0, bound, (24,), generator=generator) for bound in (80, 6))
    tokens, candidates = int(lengths.sum()), int(counts.sum())
    inner = torch.randint(0, 4, (candidates,), generator=generator)
    draw = lambda bound, *shape: torch.randint(0, bound, shape, generator=generator)  # noqa: E731
    return SequenceBatch(
        sequences={
            "history": Jagged(draw(500, tokens), lengths),
            "targets": Jagged(draw(500, tokens), lengths),
            "timestamps": Jagged(draw(900, tokens).cumsum(0), lengths),
            "candidate_timestamps": Jagged(draw(900, candidates) + 10**6, counts),
            "labels": Jagged(draw(2, candidates, 2), counts),
        },
        candidates={"candidates": Nested(draw(500, int(inner.sum())), inner, counts)},
        dense={"negatives": draw(500, 24, 16)},
        keys=derive(seed, torch.arange(24)),
    ).check()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", [HSTU, SASRec])
@pytest.mark.parametrize("head", [Retrieval, Ranking])
def test_a_step_reads_nothing_from_the_device(head, kind, autocast, monkeypatch):
    torch.manual_seed(0)
    biases = {"position_bias": True, "time_bias": True} if kind is HSTU else {}
    encoder = kind(width=64, layers=2, heads=2, max_length=80, dropout=0.2, **biases)
    options = {"tasks": ("click", "like")} if head is Ranking else {}
    model = head(encoder, num_items=500, **options).cuda()
    plans = []
    run = HSTU._run_layers

    def record(self, *inputs, **more):
        plans.append(inputs[5])
        return run(self, *inputs, **more)

    monkeypatch.setattr(HSTU, "_run_layers", record)
    for number in range(3):
        there = batch(number % 2).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        if number == 2:  # by then everything is compiled
            torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                losses = model(there)
            sum(losses.values()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(plans) == (3 if kind is HSTU else 0)
    assert all(isinstance(plan, TilePlan) for plan in plans)


def test_sasrec_drops_the_same_on_a_gpu():
    torch.manual_seed(0)
    model = SASRec(width=50, layers=2, heads=2, max_length=80, dropout=0.2)
    lengths, keys = torch.tensor([70, 0, 1, 20]), torch.arange(4) * 7919
    x = torch.randn(91, 50)
    results = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        out = model(x.to(device), lengths.to(device), keys.to(device))
        out.square().sum().backward()
        grads = [parameter.grad.cpu().clone() for parameter in model.parameters()]
        results.append([out.detach().cpu(), *grads])
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).norm() < 1e-4 * theirs.norm()


# ---- fused layers


@pytest.mark.parametrize("widths", [(32, 64), (25, 50)], ids=["fitting heads", "padded heads"])
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases and candidates"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_layers_are_as_exact_as_plain_ones(poisoned, dtype, biases, widths):
    options = dict(biases=biases, candidates=biases, layers=3, parts=2, widths=widths)
    found = layer_cases.fused(dtype, 0.25, **options, device="cuda")
    limit = 1e-5 if dtype == "float32" else 2e-2
    assert all(
        value < limit if isinstance(value, float) else value is True for value in found.values()
    ), found


def count_launches(run):
    run()  # compiles
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(
        event.count
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.key.startswith(("Memcpy", "Memset"))
    )


def test_a_layer_takes_few_launches():
    """From the difference between two depths, to exclude what a model does once."""
    lengths = torch.tensor([70, 3, 200, 41], device="cuda")
    keys = derive(1, torch.arange(4)).cuda()

    def build(layers):
        torch.manual_seed(0)
        encoder = HSTU(
            width=64, layers=layers, heads=2, max_length=200, dropout=0.2,
            position_bias=False, time_bias=False,
        ).cuda()  # fmt: skip
        x = torch.randn(314, 64, device="cuda", requires_grad=True)
        weights = list(encoder.parameters())

        def forward():
            with torch.autocast("cuda", torch.bfloat16):
                return encoder(x, lengths, keys)

        out = forward()
        slope = torch.randn_like(out)
        backward = lambda: torch.autograd.grad(out, [x, *weights], slope, retain_graph=True)  # noqa: E731
        return count_launches(forward), count_launches(backward)

    (few, few_back), (many, many_back) = build(2), build(4)
    assert (many - few) / 2 <= 6 and (many_back - few_back) / 2 <= 14


def test_recomputing_gives_the_same_bits():
    lengths = torch.tensor([70, 3, 200, 41], device="cuda")
    keys, found = derive(1, torch.arange(4)).cuda(), []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        encoder = HSTU(
            width=64, layers=2, heads=2, max_length=200, dropout=0.2,
            position_bias=False, time_bias=False, checkpoint=checkpoint,
        ).cuda()  # fmt: skip
        with torch.autocast("cuda", torch.bfloat16):
            out = encoder(torch.randn(314, 64, device="cuda"), lengths, keys)
        found.append([out, *torch.autograd.grad(out.sum(), list(encoder.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
