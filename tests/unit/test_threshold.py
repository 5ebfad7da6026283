"""Thresholds, messages and the exchange of activations in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import freescale
from freescale.cli.main import main
from freescale.compress.entries import compute_owner_edges, pack_entries, unpack_entries
from freescale.compress.threshold import (
    compute_budget,
    compute_remaining_budget,
    compute_threshold,
    distribute_budget,
    select_largest,
)
from freescale.config import TrainConfig
from freescale.pipeline.dense.local import LocalGradients
from freescale.pipeline.dense.thresholded import ThresholdedGradients
from freescale.transport.local import LocalTransport


@pytest.mark.parametrize(
    ("eta", "sent"), [(0.99, 10), (0.9, 100), (0.5, 500), (0.0, 1000), (0.9995, 0)]
)
def test_a_share_reaches_the_threshold(eta, sent):
    assert compute_budget(1000, eta) == sent
    sent = max(1, sent)
    magnitudes = torch.randn(1000, generator=torch.Generator().manual_seed(1)).abs()
    positions = select_largest(magnitudes, compute_threshold(magnitudes, sent), 1000)
    assert positions.tolist() == sorted(magnitudes.topk(sent).indices.tolist())


def test_tensors_share_a_budget():
    """What whole tensors take is missing to the others; the sum is kept where every tensor can send
    one entry."""
    sizes = [100_000, 500, 928_970, 30, 500]
    assert compute_remaining_budget(sizes, 0.99) == 10_300 - 1_030
    sizes[3] += 1
    assert compute_remaining_budget(sizes, 0.99) == 10_289, (
        "more than a tenth: the large ones have a share of their own"
    )
    assert (
        compute_remaining_budget([1024, 1023, 0], 0.0)
        == 1024
        == compute_remaining_budget([1024], 0.0)
    )
    assert distribute_budget([100_000, 900_000], 10_300 - 1_030) == [927, 8342]
    assert distribute_budget([32, 4000, 32], 40) == [1, 37, 1], "at least one of each"
    assert distribute_budget([2000, 1, 4096], 6097) == [2000, 1, 4096] and distribute_budget(
        [50, 20, 9], 1
    ) == [1, 1, 1]
    assert distribute_budget([1, 1], 2) == [1, 1] and distribute_budget([], 0) == []
    for allowed in range(5, 3000, 7):
        assert (
            sum(distribute_budget(sizes, allowed)) <= allowed
            and min(distribute_budget(sizes, allowed)) >= 1
        )


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        pytest.param([3000, 40, 30, 5], 922, id="whole tensors within the share"),
        pytest.param([3000, 400, 32, 32], 900 + 464, id="small model, whole tensors on top"),
    ],
)
@pytest.mark.parametrize("every", [1, 4])
def test_a_step_sends_no_more_than_its_share(sizes, allowed, every):
    """Of all entries, those of whole tensors and equal ones too: gradients of few distinct values.
    In a small model the whole ones come on top."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    gradients = ThresholdedGradients(parameters, torch.device("cpu"), 0.7, every)
    generator = torch.Generator().manual_seed(0)
    for step in range(9):
        gradients.clear()
        for parameter in parameters:
            parameter.grad.copy_(torch.randint(1, 4, parameter.shape, generator=generator).float())
        gradients.start(LocalTransport(), torch.zeros(1))
        gradients.send()
        gradients.reduce()
        sent = sum(int(parameter.grad.count_nonzero()) for parameter in parameters)
        assert sent <= allowed
        assert step % every or sent > allowed - len(sizes), (
            "a threshold that was just set leaves nothing unused"
        )
    assert list(gradients.state) == parameters[:1]


def test_zeros_stay_and_what_is_not_a_number_goes():
    magnitudes = torch.zeros(2000)
    magnitudes[[3, 7]] = torch.tensor([1e-30, math.nan])
    assert select_largest(magnitudes, compute_threshold(magnitudes, 200), 200).tolist() == [3, 7]
    assert select_largest(magnitudes, torch.tensor(1.0), 200).tolist() == [7]
    assert select_largest(magnitudes, torch.tensor(1e-31), 1).tolist() == [7]
    assert select_largest(
        torch.tensor([math.nan, 2.0, math.nan, math.nan]), torch.tensor(1.0), 2
    ).tolist() == [0, 2, 3]


def test_of_equal_entries_the_first_go():
    magnitudes = torch.tensor([3.0, 1.0, 3.0, 2.0, 3.0, 9.0])
    for most, sent in (
        (1, [5]),
        (2, [0, 5]),
        (3, [0, 2, 5]),
        (4, [0, 2, 4, 5]),
        (5, [0, 2, 3, 4, 5]),
        (6, [0, 1, 2, 3, 4, 5]),
    ):
        assert select_largest(magnitudes, torch.tensor(1.0), most).tolist() == sent


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_messages(dtype):
    for count in (3, 1, 0):
        positions, values = (
            torch.tensor([2**31 - 1, 5, 0])[:count],
            torch.tensor([1.5, -2, 3], dtype=dtype)[:count],
        )
        message = pack_entries(positions, values)
        assert message.shape == (count, 4 + values.element_size())
        assert all(
            torch.equal(a, b)
            for a, b in zip(unpack_entries(message, dtype), (positions, values), strict=True)
        )
    assert compute_owner_edges(10, 4) == [0, 2, 5, 7, 10]


def reduced(gradients: ThresholdedGradients, value: torch.Tensor) -> torch.Tensor:
    gradients.clear()
    gradients.parameters[0].grad.copy_(value)
    gradients.start(LocalTransport(), torch.zeros(1))
    gradients.send()
    gradients.reduce()
    return gradients.parameters[0].grad.clone()


def test_nothing_is_lost_and_small_tensors_are_whole():
    """Over any number of steps: what was sent plus what is kept is the sum of the gradients, in
    integers to the bit."""
    large, small = nn.Parameter(torch.zeros(40, 50)), nn.Parameter(torch.zeros(9))
    gradients = ThresholdedGradients([large, small], torch.device("cpu"), 0.9, every=3)
    generator = torch.Generator().manual_seed(0)
    applied = total = torch.zeros(40, 50)
    sent = []
    for _ in range(12):
        new = torch.randint(-1000, 1000, (40, 50), generator=generator).float()
        gradients.clear()
        large.grad.copy_(new)
        small.grad.copy_(torch.arange(9.0))
        gradients.start(LocalTransport(), torch.zeros(1))
        gradients.send()
        gradients.reduce()
        total, applied = total + new, applied + large.grad
        sent.append(int(large.grad.count_nonzero()))
        assert torch.equal(applied + gradients.state[large]["error"], total)
        assert torch.equal(small.grad, torch.arange(9.0))
    assert sent[0] == sent[6] == 200 - 9 and min(sent) > 40 and max(sent) <= 200 - 9
    assert small not in gradients.state


def test_thresholds_are_reset_in_time():
    parameter = nn.Parameter(torch.zeros(2000))
    gradients = ThresholdedGradients([parameter], torch.device("cpu"), 0.9, every=3)
    reduced(gradients, torch.zeros(2000))  # a rank without a sample
    seen = []
    for step in range(7):
        reduced(gradients, torch.arange(2000.0) * 10**step)
        seen.append(gradients.state[parameter]["threshold"].item())
    changes = [a != b for a, b in zip(seen[:-1], seen[1:], strict=True)]
    assert seen[0] == 1800 and changes == [False, False, True, False, False, True]


def test_clip_scales_what_is_applied():
    parameter = nn.Parameter(torch.zeros(2000))
    gradients = ThresholdedGradients([parameter], torch.device("cpu"), 0.5)
    applied = reduced(gradients, torch.arange(2000.0))
    error = gradients.state[parameter]["error"].clone()
    norm = gradients.clip(1.0)
    assert norm == pytest.approx(applied.double().norm().item(), rel=1e-12)
    torch.testing.assert_close(parameter.grad, applied / applied.norm())
    assert torch.equal(gradients.state[parameter]["error"], error) and error.count_nonzero() == 999


def test_off_by_default():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.item = nn.Embedding(4, 2)
            self.layer = nn.Linear(2, 1)

    parallel = freescale.parallelize(
        Model(), {"item": ["history"]}, freescale.SGD(lr=1.0), transport=LocalTransport()
    )
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=1.0)
    for schedule in ("serial", "staged"):
        pipeline = freescale.Pipeline(parallel, optimizer, schedule=schedule)
        assert type(pipeline.reducer) is LocalGradients  # one rank has nothing to sum
    assert TrainConfig().compress_dense is None


@pytest.mark.parametrize("eta", [-0.1, 1.0, math.nan, 99])
def test_bad_shares_are_refused(eta, capsys):
    with pytest.raises(ValueError, match="at least 0 and below 1, got"):
        freescale.Thresholding(eta)
    with pytest.raises(SystemExit) as left:
        main(["train", "--data", "x", "--compress-dense", str(eta)], standalone_mode=False)
    assert left.value.code == 1
    assert "freescale: error: --compress-dense must be" in capsys.readouterr().err


def test_bad_periods_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        freescale.Thresholding(0.9, every=0)
    with pytest.raises(ValueError, match="--compress-every must be at least 1"):
        TrainConfig(compress_every=0)


@pytest.mark.parametrize("keep", [1, 3, 8])
def test_exchange_of_one_process_is_a_mask(keep):
    x = torch.randn(
        5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True
    )
    weight = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = torch.zeros(5, 8, dtype=torch.float64).scatter_(
        1, x.detach().abs().topk(keep, 1).indices, 1.0
    )
    out = freescale.ThresholdedExchange(LocalTransport(), keep)(x)
    (out.square() * weight).sum().backward()
    assert torch.equal(out, x * mask)
    torch.testing.assert_close(x.grad, 2 * x.detach() * weight * mask)


def test_bad_exchanges_are_refused():
    with pytest.raises(
        ValueError, match=("keep, the entries of a row that travel, must be at least 1, got 0")
    ):
        freescale.ThresholdedExchange(LocalTransport(), 0)
    exchange = freescale.ThresholdedExchange(LocalTransport(), 9)
    for x, send, what in (
        (torch.zeros(2, 8), None, "keep = 9 is more than the 8 entries"),
        (torch.zeros(2, 9, 1), None, r"takes \[rows, width\], not \[2, 9, 1\]"),
        (torch.zeros(2, 9), [1], r"2 in all, not \[1\]"),
    ):
        with pytest.raises(ValueError, match=what):
            exchange(x, send)
