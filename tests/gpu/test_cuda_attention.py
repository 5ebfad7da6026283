"""The Triton attention on a GPU against the reference in float64: every width and dtype, hard
lengths, and its guarantees."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_cases import compare, isolation, skipping

from freescale.kernels.attention.triton import WeightDropout, hstu_attention, softmax_attention
from freescale.kernels.attention.triton_plan import plan_attention
from freescale.visible import Visible

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
MIXED = [1000, 1, 0, 129, 300, 2100, 64, 128], [900, 1, 0, 1, 0, 130, 0, 64]


@pytest.fixture(autouse=True)
def poisoned():
    """Uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_close(limit, **options):
    errors = compare(device="cuda", **options)
    far = {name: error for name, error in errors.items() if not error < limit}  # NaN too
    assert not far, str(far)


@pytest.mark.parametrize("special", [False, True], ids=["plain", "candidates and biases"])
@pytest.mark.parametrize("widths", [(32, 32), (64, 64), (128, 128), (32, 128)])
@pytest.mark.parametrize("dtype", LIMITS)
def test_equals_the_plain_attention(dtype, widths, special):
    assert_close(
        LIMITS[dtype], name=MIXED, candidates=special, biases=special, dtype=dtype, widths=widths
    )


@pytest.mark.parametrize(
    "lengths",
    [[21000, 3, 500], [512] * 6, [1] * 5000, [5000] + [7] * 300],
    ids=["long", "equal", "ones", "giant"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lengths(dtype, lengths):
    assert_close(
        LIMITS[dtype],
        name=(lengths, None),
        candidates=False,
        biases=False,
        dtype=dtype,
        widths=(64, 64),
        heads=1,
    )


def test_biases_at_length():
    assert_close(
        1e-2,
        name=([21000, 3, 500], [64, 1, 500]),
        candidates=True,
        biases=True,
        dtype="bfloat16",
        widths=(64, 64),
        heads=1,
    )


def test_times_in_64_bits():
    assert_close(1e-2, name=MIXED, candidates=True, biases=True, dtype="bfloat16", step=10**12)


@pytest.mark.parametrize("biases", [False, True])
def test_heads_of_256(biases):
    assert_close(
        1e-2, name=MIXED, candidates=True, biases=biases, dtype="bfloat16", widths=(256, 256)
    )


@pytest.mark.parametrize("candidates", [False, True])
def test_gradients_of_keys_and_values_in_two_kernels(candidates):
    assert_close(
        1e-2, name=MIXED, candidates=candidates, dtype="bfloat16", widths=(128, 128), apart=True
    )


@pytest.mark.parametrize("width", [64, 128, 256])
def test_biases_beyond_the_budget(width):
    assert_close(
        1e-2, name=MIXED, candidates=True, biases=True, dtype="bfloat16", widths=(width, width),
        pair_budget=0,
    )  # fmt: skip


@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("first, last", [(64, 256), (0, 1), (100, 77), (5, 3000)])
def test_semi_local(first, last, biases, width):
    for candidates in (False, True):
        assert_close(
            1e-2, name=MIXED, candidates=candidates, biases=biases, dtype="bfloat16",
            widths=(width, width), visible=(first, last),
        )  # fmt: skip


def test_semi_local_in_float32_and_at_length():
    assert_close(1e-5, name=MIXED, candidates=True, biases=True, visible=(64, 300))
    lengths = [16_384, 3, 500], [64, 1, 0]
    assert_close(
        1e-2, name=lengths, candidates=True, biases=True, dtype="bfloat16", widths=(64, 64),
        heads=1, visible=(64, 1024),
    )  # fmt: skip


def test_tiles_that_nobody_sees_are_not_visited():
    found = skipping("cuda")
    assert len(found) == 6 and all(found.values()), found


@pytest.mark.parametrize("keep", [1.0, 0.8])
@pytest.mark.parametrize("visible", [None, (64, 256)])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", LIMITS)
def test_softmax(dtype, width, visible, keep):
    if dtype == "float32" and width == 256:
        pytest.skip("tiles do not fit on an SM; the plan takes plain torch")
    for candidates in (False, True):
        assert_close(
            LIMITS[dtype], name=MIXED, candidates=candidates, dtype=dtype, widths=(width, width),
            softmax=True, keep=keep, visible=visible,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax_of_high_scores_and_long_histories(dtype):
    shape = {"dtype": dtype, "widths": (64, 64), "softmax": True, "candidates": False}
    assert_close(5 * LIMITS[dtype], name=MIXED, size=5.0, **shape)
    assert_close(LIMITS[dtype], name=([16_384, 3, 500], None), heads=1, **shape)


def test_softmax_gives_the_same_bits_every_time_without_a_synchronization():
    leaves, _, lengths, _ = drawn([3000, 17, 0, 900, 2222])
    keys = torch.arange(leaves[0].shape[0], device="cuda")
    runs = []
    for number in range(3):
        plan = plan_attention(lengths, 2, visible=Visible(64, 700))
        torch.cuda.synchronize()
        if number:  # the first one compiles
            torch.cuda.set_sync_debug_mode("error")
        try:
            dropout = WeightDropout(keys, 1, 0.9)
            out = softmax_attention(*leaves, plan, alpha=0.1, dropout=dropout)
            grads = torch.autograd.grad(out.float().square().sum(), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runs.append([out.detach(), *grads])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_slices_of_one_projection():
    assert_close(1e-2, name=MIXED, candidates=False, biases=False, dtype="bfloat16", sliced=True)


def test_samples_do_not_reach_each_other():
    assert isolation("cuda") == {"before": True, "after": True}


def drawn(lengths, heads=2, width=64, dtype=torch.bfloat16):
    tokens = sum(lengths)
    q, k, v = (
        torch.randn(tokens, heads, width, device="cuda", dtype=dtype).requires_grad_()
        for _ in range(3)
    )
    biases = {
        name: torch.randn(n, device="cuda").requires_grad_()
        for name, n in (("position_bias", 4000), ("time_bias", 33))
    }
    timestamps = torch.randint(0, 900, (tokens,), device="cuda").cumsum(0)
    return [q, k, v], biases, torch.tensor(lengths, device="cuda"), timestamps


def test_the_same_bits_every_time_without_a_synchronization():
    leaves, biases, lengths, timestamps = drawn([3000, 17, 0, 900, 2222])
    counts = torch.tensor([100, 17, 0, 0, 50], device="cuda")
    shared = {"candidate_counts": counts, "timestamps": timestamps}
    runs = []
    for number in range(3):
        plan = plan_attention(lengths, 2, buckets=32, distances=True, **shared)
        torch.cuda.synchronize()
        if number:  # the first one compiles
            torch.cuda.set_sync_debug_mode("error")
        try:
            out = hstu_attention(
                *leaves, lengths, scale_length=4000, alpha=0.1, plan=plan, **biases, **shared
            )
            grads = torch.autograd.grad(out.float().square().sum(), [*leaves, *biases.values()])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runs.append([out.detach(), *grads])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_memory_grows_with_the_tokens():
    peaks = []
    for length in (8192, 16384):
        leaves, _, lengths, _ = drawn([length])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        hstu_attention(*leaves, lengths, scale_length=length, alpha=0.1).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del leaves
    assert peaks[1] < 2.2 * peaks[0] < 2.2 * 16 * 8192 * 2 * 64 * 2


def test_more_elements_than_32_bits_can_count():
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    heads, width, last = 32, 128, 300
    lengths = [200] * 2700 + [last]  # 2.2e9 elements
    tokens = sum(lengths)
    assert tokens * heads * width > 2**31
    q, k, v = (
        torch.randn(tokens, heads, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    out = hstu_attention(q, k, v, torch.tensor(lengths, device="cuda"), scale_length=200, alpha=0.1)
    weight = torch.randn(last, heads, width, device="cuda", dtype=torch.bfloat16)
    grads = torch.autograd.grad((out[-last:] * weight).sum(), (q, k, v))
    alone = [x[-last:].detach().clone().requires_grad_() for x in (q, k, v)]
    expected = hstu_attention(
        *alone, torch.tensor([last], device="cuda"), scale_length=200, alpha=0.1
    )
    assert torch.equal(out[-last:], expected)
    for all_of_them, own in zip(
        grads, torch.autograd.grad((expected * weight).sum(), alone), strict=True
    ):
        assert torch.equal(all_of_them[-last:], own) and not all_of_them[:-last].any()
