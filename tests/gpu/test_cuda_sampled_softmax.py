"""The sampled softmax on a GPU against its definition in float64; the head reads nothing from the
device; evaluation's tiles against the CPU's."""

from __future__ import annotations

import pytest
import torch
from helpers import softmax_cases
from helpers.softmax_cases import PER, differentiate, draw

from freescale.batch import Jagged, SequenceBatch
from freescale.kernels.best_items import find_best
from freescale.kernels.softmax import reference, triton
from freescale.kernels.softmax.scores import choose_tile, count_better, score_targets
from freescale.models import HSTU, Retrieval
from freescale.train.device_figures import watch_compilations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def poisoned():
    """Memory that nothing has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def holds(found, dtype):
    limit = softmax_cases.LIMITS[dtype]
    return all(
        value is True if isinstance(value, bool) else value < limit for value in found.values()
    )


FULL = {"weighted": True, "log_q": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lengths, width, k, extra",
    [
        pytest.param([70, 0, 1500, 2], 50, 128, {}, id="a width that is no power of two"),
        pytest.param([1, 2, 3] * 400, 64, 20, FULL, id="many samples"),
        pytest.param([700, 300], 256, 300, FULL, id="several tiles of negatives"),
        pytest.param([200, 77], 1024, 128, {}, id="wide"),
        pytest.param([5, 0, 1, 12, 3], 8, 7, {"normalize": False}, id="without norms"),
    ],
)
@pytest.mark.parametrize("per", PER)
def test_equals_the_definition(poisoned, per, lengths, width, k, extra, dtype):
    found = softmax_cases.compare(
        per, lengths=lengths, width=width, k=k, items=500, dtype=dtype, device="cuda", **extra
    )
    if "normalize" in extra and dtype == "bfloat16":
        # scores grow with the norms: a rounded operand moves them by more
        assert found["loss"] < 0.05 and found["same bits"] and found["dtypes"], found
    else:
        assert holds(found, dtype), found


@pytest.mark.parametrize("per", PER)
def test_rows_with_many_entries(poisoned, per):
    found = softmax_cases.compare(
        per, lengths=[3000, 9, 4000], width=64, k=32, items=5, dtype="float32", device="cuda"
    )
    assert holds(found, "float32"), found


@pytest.mark.parametrize("per", PER)
def test_nothing_compiles_when_the_batch_changes(per):
    """Token counts, their divisors and the alignment of indices change from step to step."""

    def run(lengths, shift):
        leaves, (targets, negatives, sizes), options = draw(
            per, lengths, k=16, width=64, items=99, dtype=torch.float32, device="cuda"
        )
        moved = torch.cat([targets[:shift], targets])[shift:]
        index = torch.cat([negatives.index.view(-1)[:shift], negatives.index.view(-1)])[shift:]
        negatives = reference.Negatives(index.view(negatives.index.shape), per)
        loss = triton.sampled_softmax(
            *leaves, moved, negatives, sizes, normalize=True, temperature=options["temperature"]
        )
        loss.backward()

    run([160, 32], 0)
    list_compiled = watch_compilations()
    for lengths, shift in (([160, 33], 1), ([1], 1), ([7, 0, 1, 9], 0), ([512] * 3, 1)):
        run(lengths, shift)
    assert list_compiled() == []


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_of_the_head_reads_no_device(per, autocast):
    torch.manual_seed(0)
    encoder = HSTU(
        width=64, layers=1, heads=2, max_length=300, dropout=0.0, position_bias=False,
        time_bias=False,
    )  # fmt: skip
    model = Retrieval(encoder, num_items=1000).cuda()
    lengths = torch.tensor([300, 0, 40, 177])
    tokens = int(lengths.sum())
    shape = {"sample": (4,), "position": (tokens,), "batch": ()}[per] + (128,)
    columns = {"negatives": torch.randint(0, 1000, shape)}
    sequences = {
        n: Jagged(torch.randint(0, 1000, (tokens,)), lengths) for n in ("history", "targets")
    }
    if per == "position":
        sequences["negatives"] = Jagged(columns["negatives"], lengths)
    batch = SequenceBatch(
        sequences,
        dense=columns if per == "sample" else {},
        shared=columns if per == "batch" else {},
    )
    there = batch.to("cuda")

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(there)["next_item"]
        loss.backward()
        return loss.detach()

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gradient = model.item.weight.grad.cpu()
    model.cpu()
    model.zero_grad(set_to_none=True)
    expected = model(batch)["next_item"]
    expected.backward()
    torch.testing.assert_close(
        loss.cpu(), expected.detach(), rtol=2e-2 if autocast else 1e-5, atol=0
    )
    error = (gradient - model.item.weight.grad).norm() / model.item.weight.grad.norm()
    assert error < (5e-2 if autocast else 1e-4), error


def test_evaluation_ranks_as_on_the_cpu():
    torch.manual_seed(0)
    queries, items = torch.randn(300, 64, dtype=torch.float64), torch.randn(40_000, 64).double()
    places = torch.randint(0, 40_000, (300,))
    left_out = Jagged(torch.randint(-1, 40_000, (900,)), torch.full((300,), 3))
    seen = (places[:, None] + torch.tensor([1, 7, 20_000])) % 40_000
    tile, found = choose_tile(40_000), {}
    for device in ("cpu", "cuda"):
        q, i, p, past = (x.to(device) for x in (queries, items, places, seen))
        goals = score_targets(q, i, p, tile=tile)
        counts = count_better(q, i, p, goals, tile=tile, seen=past)
        best = find_best(q, i, 10, left_out=left_out)[1]
        found[device] = [value.cpu() for value in (*counts, best)]
    assert all(torch.equal(a, b) for a, b in zip(found["cpu"], found["cuda"], strict=True))


def test_equal_rows_are_ties():
    torch.manual_seed(0)
    queries = torch.randn(700, 50, device="cuda")
    items = torch.randn(1, 50, device="cuda").expand(20_000, 50).contiguous()
    tile, places = choose_tile(20_000), torch.arange(700, device="cuda") * 28
    goals = score_targets(queries, items, places, tile=tile)
    assert (count_better(queries, items, places, goals, tile=tile)[0] == 19_999).all()


@pytest.mark.parametrize("per", PER)
def test_the_plain_one_runs_on_a_gpu_too(per):
    leaves, arguments, options = draw(per, device="cuda", weighted=True, log_q=True)
    options["normalize"] = True
    found = differentiate(reference.sampled_softmax, leaves, arguments, options)
    expected = differentiate(softmax_cases.define, leaves, arguments, options)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
