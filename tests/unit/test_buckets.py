"""Dense gradients leave in buckets while the backward goes on, in an order that does not depend on
what a rank computes."""

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from freescale.ledger.ledger import Ledger
from freescale.pipeline.dense.buckets import GradientBuckets
from freescale.sequences import mark_positions
from freescale.transport.local import LocalTransport

CPU = torch.device("cpu")


class Watched(LocalTransport):
    """Keeps what was summed, as it was when it left."""

    def __init__(self):
        super().__init__(CPU, Ledger(CPU))
        self.left = []
        self.gathered = 0

    def gather_bytes(self, payload):
        self.gathered += 1
        return super().gather_bytes(payload)

    def all_reduce(self, tensor, kind):
        self.left.append((tensor.data_ptr(), tensor.clone()))
        return super().all_reduce(tensor, kind)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(700, 700) for _ in range(8)])


def _watching(parameters):
    """As in a run that goes on."""
    buckets = GradientBuckets(parameters, CPU)
    buckets.run = buckets.watch_backward()
    buckets.run.__enter__()
    return buckets


def _step(buckets, transport, model, x, losses=None, overlapped=True):
    """As the schedules do: staged starts before the backward, serial after it."""
    losses = torch.zeros(1) if losses is None else losses
    buckets.clear()
    if overlapped:
        buckets.start(transport, losses)
    if x is not None:
        model(x).square().sum().backward()
    if not overlapped:
        buckets.start(transport, losses)
    before = len(transport.left)
    buckets.send()
    return before, buckets.reduce()


def test_buckets_leave_during_the_backward_with_their_gradients():
    model, transport, seen = _model(), Watched(), []
    buckets = _watching(model.parameters())
    model[0].weight.register_hook(lambda gradient: seen.append(len(transport.left)))
    x, losses = torch.randn(4, 700), torch.tensor([3.0])
    _step(buckets, transport, model, x)
    # the first backward shows the order: nothing but the losses leaves before its end
    assert seen == [1]
    transport.left.clear()
    before, summed = _step(buckets, transport, model, x, losses)
    assert len(buckets.flat) >= 4 and before == len(transport.left) == 1 + len(buckets.flat)
    assert 1 + 3 <= seen[1] < before  # most had left when the first layer got its gradient
    assert [address for address, _ in transport.left[1:]] == [
        buffer.data_ptr() for buffer in buckets._buffers
    ] and summed.item() == 3.0
    for (_, left), flat in zip(transport.left[1:], buckets.flat, strict=True):
        assert torch.equal(left[-flat.numel() :], flat)  # nothing was added after it had left
    alone = _model()
    alone(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # a small one takes the next, however large; the last joins it
        pytest.param([265, 10, 800, 10], [[265], [10, 800, 10]], id="small ones join the next"),
        pytest.param([10, 10], [[10, 10]], id="all small"),
        pytest.param([60, 60, 60, 60], [[60], [60], [60], [60]], id="none small"),
        pytest.param([900], [[900]], id="one large"),
    ],
)
def test_no_bucket_is_small(sizes, expected, monkeypatch):
    """Sizes in the order of the backward; at least 50 numbers to a bucket, at most a fourth of all
    where that is more."""
    monkeypatch.setattr("freescale.pipeline.dense.buckets._LEAST_BYTES", {"cpu": 50 * 4})
    buckets = _watching([nn.Parameter(torch.zeros(size)) for size in reversed(sizes)])
    assert [flat.numel() for flat in buckets.flat] == [sum(bucket) for bucket in expected]


def test_the_first_backward_sums_as_the_later_ones():
    """A run that is resumed has its first backward later: its sums are those of the run before."""
    left = []
    for steps in (1, 2):
        model, transport = _model(), Watched()
        buckets = _watching(model.parameters())
        x = torch.ones(4, 700)
        for _ in range(steps):
            transport.left.clear()
            _step(buckets, transport, model, x)
        left.append([tensor for _, tensor in transport.left])
    assert len(left[0]) >= 5 and all(torch.equal(a, b) for a, b in zip(*left, strict=True))


class Told(Watched):
    """What another rank, which is first, saw."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def gather_bytes(self, payload):
        self.sent = json.loads(super().gather_bytes(payload)[0])
        return [json.dumps(self.order).encode(), payload]


def test_a_rank_without_a_batch_or_with_unused_parameters_sends_the_same():
    orders = []
    order = list(reversed(range(16)))
    for used in (8, 5, 0):
        model, transport = _model(), Told(order)
        buckets = _watching(model.parameters())
        x = torch.randn(2, 700) if used else None
        for _ in range(2):
            _step(buckets, transport, model[:used], x)
        assert len(transport.sent) == 2 * used
        orders.append([left.shape for _, left in transport.left])
    assert orders[0] == orders[1] == orders[2]


class Reading(Watched):
    """Another rank has used the parameters of these numbers."""

    def __init__(self, others):
        super().__init__()
        self.others, self.buckets = others, None

    def all_reduce(self, tensor, kind):
        handle = super().all_reduce(tensor, kind)
        if tensor.data_ptr() == self.buckets._marks.data_ptr():
            tensor[self.others] += 1
        return handle


@pytest.mark.parametrize("width", [8, 700], ids=["one bucket", "several"])
@pytest.mark.parametrize("overlapped", [True, False])
def test_what_no_rank_has_used_has_no_gradient(width, overlapped):
    """In each step anew; what another rank has used has zeros here."""
    model, transport = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]), Reading([4])
    parameters = list(model.parameters())
    transport.buckets = buckets = _watching(parameters)
    assert (len(buckets.flat) > 1) == (width == 700)
    x = torch.randn(2, width)
    for used in (1, 8, 0, 1):
        _step(buckets, transport, model[:used], x if used else None, overlapped=overlapped)
        there = [parameter.grad is not None for parameter in parameters]
        assert there == [number < 2 * used or number == 4 for number in range(16)]
        if used < 3:
            assert not parameters[4].grad.any()


def test_only_the_last_backward_sends():
    model, transport = _model(), Watched()
    buckets = _watching(model.parameters())
    _step(buckets, transport, model, torch.randn(2, 700))
    transport.left.clear()
    buckets.clear()
    model(torch.randn(2, 700)).sum().backward()
    assert not transport.left
    buckets.start(transport, torch.zeros(1))
    model(torch.randn(2, 700)).sum().backward()
    assert len(transport.left) == 1 + len(buckets.flat)


@pytest.mark.parametrize("overlapped", [True, False])
def test_the_order_is_agreed_on_once(overlapped):
    model, transport = _model(), Watched()
    buckets = _watching(model.parameters())
    for _ in range(3):
        _step(buckets, transport, model, torch.randn(2, 700), overlapped=overlapped)
    assert transport.gathered == 1


def test_both_schedules_divide_alike():
    shapes = []
    for overlapped in (True, False):
        model, transport = Backwards(), Watched()
        buckets = _watching(model.parameters())
        _step(buckets, transport, model, torch.randn(2, 700), overlapped=overlapped)
        shapes.append([sorted(members) for members in buckets._members])
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("width", [8, 700])
def test_a_gradient_that_comes_twice_is_an_error_where_it_may_have_left(width):
    layer, transport = nn.Linear(width, width), Watched()
    further = nn.Linear(width, width)  # with 700, in a bucket of its own
    buckets = _watching([*layer.parameters(), *further.parameters()])
    buckets.adopt_order([3, 2, 1, 0])
    buckets.clear()
    buckets.start(transport, torch.zeros(1))
    x = start = torch.randn(2, width, requires_grad=True)
    for _ in range(2):  # each segment is a backward of its own
        x = checkpoint(layer, x, use_reentrant=True)
    if width == 700:
        with pytest.raises(RuntimeError, match="twice"):
            x.sum().backward()
        return
    x.sum().backward()
    buckets.send()
    buckets.reduce()
    plain = torch.autograd.grad(layer(layer(start)).sum(), layer.weight)[0]
    torch.testing.assert_close(layer.weight.grad, plain)


class Backwards(nn.Module):
    """Its parameters are registered in the order of the backward, not of the forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(reversed(list(_model())))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def test_a_bucket_holds_gradients_that_come_one_after_another():
    model, transport, seen = Backwards(), Watched(), []
    buckets = _watching(model.parameters())
    # the forward's first layer
    model.layers[-1].weight.register_hook(lambda gradient: seen.append(len(transport.left)))
    for _ in range(2):
        transport.left.clear()
        _step(buckets, transport, model, torch.randn(2, 700))
    assert seen[0] == 1 and seen[1] >= 1 + 3
    firsts = [min(members) for members in buckets._members]
    assert firsts == sorted(firsts)  # parameters are registered in the order of the backward here


def test_an_order_is_adopted_and_nothing_is_agreed_on_again():
    """That of a run before, whose first backward was another one; the next backward sends as it
    comes."""
    first, transport = Backwards(), Watched()
    shown = _watching(first.parameters())
    assert shown.order is None
    x = torch.ones(2, 700)
    _step(shown, transport, first, x)
    assert sorted(shown.order) == list(range(16)) and shown.order != list(reversed(range(16)))
    model, transport = Backwards(), Watched()
    buckets = _watching(model.parameters())
    buckets.adopt_order(shown.order)
    _step(buckets, transport, model, x)
    assert (
        transport.gathered == 0
        and buckets._members == shown._members
        and buckets.order == shown.order
    )
    for ours, theirs in zip(model.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    buckets.adopt_order(None)  # back to before the first step
    assert buckets.order is None
    _step(buckets, transport, model, x)
    assert transport.gathered == 1 and buckets.order == shown.order


def test_a_model_of_one_bucket_has_an_order_from_the_beginning():
    assert GradientBuckets(nn.Linear(2, 2).parameters(), CPU).order == [1, 0]


def test_the_norm_of_complex_gradients_has_both_parts():
    def parameters():
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(7, dtype=torch.complex64)), nn.Parameter(torch.randn(5))]

    ours, theirs = parameters(), parameters()
    buckets = _watching(ours)
    buckets.clear()
    for both in (ours, theirs):
        sum((3 * parameter.abs().square()).sum() for parameter in both).backward()
    expected = nn.utils.clip_grad_norm_(theirs, 0.5)
    torch.testing.assert_close(buckets.clip(0.5), expected.double(), rtol=1e-6, atol=0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)


class Placed(nn.Module):
    """A row for each of 50 positions in front of a layer."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(50, 8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x):  # [tokens, 8]
        return self.layer(x + self.position[: x.shape[0]])


@pytest.mark.parametrize(("longest", "rows"), [(4, 5), (49, 50), (80, 50), (None, 50)])
def test_rows_of_positions_that_no_sample_has_do_not_travel(longest, rows):
    torch.manual_seed(0)
    model, transport = Placed(), Watched()
    mark_positions(model.position)
    buckets = _watching(model.parameters())
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    buckets.clear()
    buckets.start(transport, torch.zeros(1), longest)
    model(x).square().sum().backward()
    buckets.send()
    buckets.reduce()
    (_, losses), (_, sent) = transport.left
    marks = buckets._marks.numel()
    assert losses.numel() == 1 and sent.numel() == marks + 8 * 8 + 8 + rows * 8
    # all that is not zero is in it
    assert sent[marks:].abs().sum() == pytest.approx(float(buckets.flat[0].abs().sum()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
