"""The sampled softmax against its definition: the plain one in float64, the Triton kernels through
the interpreter."""

from __future__ import annotations

import pytest
import torch
from helpers import interpreter, softmax_cases
from helpers.softmax_cases import PER, define, differentiate, draw

from freescale.kernels.softmax import reference, triton


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(softmax_cases.__file__)


@pytest.mark.parametrize("case", softmax_cases.CASES)
def test_the_kernels_equal_the_definition(interpreted, case):
    limit = softmax_cases.LIMITS[softmax_cases.CASES[case].get("dtype", "float32")]
    assert all(
        value is True if isinstance(value, bool) else value < limit
        for value in interpreted[case].values()
    ), interpreted[case]


@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "raw"])
@pytest.mark.parametrize("extra", [{}, {"weighted": True, "log_q": True}], ids=["plain", "full"])
@pytest.mark.parametrize("lengths", [(5, 0, 1, 12, 3), (70, 0, 150), (0, 0), (1,)], ids=str)
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("budget", [reference.BUDGET, 200])
def test_the_plain_one_equals_the_definition(per, lengths, extra, normalize, budget, monkeypatch):
    monkeypatch.setattr(reference, "BUDGET", budget)
    monkeypatch.setattr(reference, "FEWEST_SHARING", 20)
    leaves, arguments, options = draw(per, lengths, width=50, **extra)
    options["normalize"] = normalize
    expected = differentiate(define, leaves, arguments, options, slope=0.7)
    found = differentiate(reference.sampled_softmax, leaves, arguments, options, slope=0.7)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        alone = reference.sampled_softmax(*leaves, *arguments, **options)
    torch.testing.assert_close(alone, expected[0], rtol=1e-12, atol=1e-12)


def test_with_all_rows_as_negatives_it_is_the_full_softmax(monkeypatch):
    monkeypatch.setattr(reference, "FEWEST_SHARING", 7)
    monkeypatch.setattr(reference, "BUDGET", 1)
    leaves, (targets, *others), options = draw("batch", (18, 0, 3), items=37, whole=True)
    found = reference.sampled_softmax(*leaves, targets, *others, normalize=False, **options)
    scores = leaves[0] @ leaves[1].T / options["temperature"]
    expected = torch.nn.functional.cross_entropy(scores, targets, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(loss, leaves) for loss in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("per", PER)
def test_gradients(per, normalize):
    leaves, arguments, options = draw(
        per, (2, 0, 4), k=3, width=3, items=5, weighted=True, log_q=True
    )
    assert torch.autograd.gradcheck(
        lambda *x: reference.sampled_softmax(*x, *arguments, normalize=normalize, **options), leaves
    )


def test_rows_of_zeros_have_finite_gradients():
    leaves, arguments, options = draw("sample")
    leaves = [torch.zeros_like(leaf) for leaf in leaves]
    found = differentiate(
        reference.sampled_softmax, leaves, arguments, {**options, "normalize": True}
    )
    assert all(torch.isfinite(value).all() for value in found)


def test_lower_precision_is_computed_in_float32():
    leaves, arguments, options = draw("batch", dtype=torch.bfloat16)
    options["normalize"] = True
    loss, *grads = differentiate(reference.sampled_softmax, leaves, arguments, options)
    wide = [leaf.float() for leaf in leaves]
    exact, *_ = differentiate(reference.sampled_softmax, wide, arguments, options)
    assert torch.equal(loss, exact)
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    "per, index, message",
    [
        ("sample", (2, 4), r"per sample must be \[3, K\]"),
        ("position", (3, 4), r"per position must be \[6, K\]"),
        ("batch", (1, 4), r"per batch must be \[K\]"),
        ("batch", (0,), "K at least 1"),
    ],
)
@pytest.mark.parametrize("module", [reference, triton])
def test_shapes_that_do_not_fit(module, per, index, message):
    leaves, (targets, _, lengths), options = draw("sample", (2, 0, 4), dtype=torch.float32)
    negatives = reference.Negatives(torch.zeros(index, dtype=torch.int64), per)
    with pytest.raises(ValueError, match=message):
        module.sampled_softmax(*leaves, targets, negatives, lengths, normalize=True, **options)


@pytest.mark.parametrize("tokens", [1, 27_648, 121_000, 10**7])
def test_chunks_keep_every_multiprocessor_busy(tokens):
    chunk = triton.choose_chunk(tokens, parts=2)
    assert triton.SHORTEST_CHUNK <= chunk <= triton.LONGEST_CHUNK
    assert chunk == triton.SHORTEST_CHUNK or tokens // chunk * 2 >= triton.PROGRAMS
    assert chunk == triton.LONGEST_CHUNK or tokens // (2 * chunk) * 2 < triton.PROGRAMS
