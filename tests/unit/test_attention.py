"""Jagged attention and its padded groups, against loops over samples, queries and keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.kernels.attention import plan as attention_plan
from freescale.kernels.attention.plan import plan_attention
from freescale.kernels.attention.reference import hstu_attention
from freescale.kernels.groups import Groups, plan_groups
from freescale.visible import Visible

HEADS, D_QK, D_V, SCALE, ALPHA, BUCKETS = 2, 5, 3, 40, 0.3, 12


def square(length):
    return length * length


def naive(
    q, k, v, lengths, *, candidate_counts=None, position_bias=None, time_bias=None, timestamps=None,
    visible=None,
):  # fmt: skip
    """One query and one key at a time, straight from the definition."""
    rows, start = [], 0
    counts = [0] * len(lengths) if candidate_counts is None else candidate_counts.tolist()
    for length, candidates in zip(lengths.tolist(), counts, strict=True):
        history = length - candidates
        for i in range(length):
            total = v.new_zeros(v.shape[1:])
            for j in range(i + 1):
                if j >= history and j != i:
                    continue
                if visible and j >= visible.first and min(i, history) - j >= visible.last:
                    continue
                score = (q[start + i] * k[start + j]).sum(-1) * ALPHA  # [heads]
                if position_bias is not None:
                    score = score + position_bias[min(i, history) - min(j, history)]
                if time_bias is not None:
                    elapsed = max(1, int(timestamps[start + i] - timestamps[start + j]))
                    bucket = min(
                        max(math.floor(math.log(elapsed) / 0.301), 0), time_bias.numel() - 1
                    )
                    score = score + time_bias[bucket]
                total = total + (score * torch.sigmoid(score))[:, None] * v[start + j]
            rows.append(total / SCALE)
        start += length
    return torch.stack(rows) if rows else v * 0


def inputs(lengths, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def leaf(*shape):
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    leaves = [leaf(tokens, HEADS, width) for width in (D_QK, D_QK, D_V)] + [
        leaf(60),
        leaf(BUCKETS + 1),
    ]
    timestamps = torch.randint(-5, 400, (tokens,), generator=generator).cumsum(0)
    return leaves, torch.tensor(lengths, dtype=torch.int64), timestamps


def gradients(function, leaves, weight):
    out = function()
    grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [
        out.detach(),
        *[torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)],
    ]


LENGTHS = {
    "mixed": ([3, 0, 7, 1, 12, 7, 0, 2], [1, 0, 3, 1, 0, 7, 0, 2]),
    "single": ([1], [0]),
    "single candidate": ([1], [1]),
    "equal": ([6, 6, 6], [2, 0, 6]),
    "giant": ([2, 34, 3], [0, 4, 1]),
    "empty samples": ([0, 0], [0, 0]),
    "no sample": ([], []),
}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("with_candidates", [False, True])
@pytest.mark.parametrize(
    "case, visible",
    [
        *((case, None) for case in LENGTHS),
        *(("giant", Visible(*seen)) for seen in [(0, 1), (2, 5), (5, 1), (30, 20)]),
        *(("mixed", Visible(*seen)) for seen in [(0, 3), (4, 2)]),
    ],
)
def test_equals_the_loops(case, visible, with_candidates, biases, monkeypatch):
    lengths, counts = LENGTHS[case]
    leaves, lengths, timestamps = inputs(lengths)
    q, k, v, position_bias, time_bias = leaves
    options = (
        {"candidate_counts": torch.tensor(counts, dtype=torch.int64)} if with_candidates else {}
    )
    if biases:
        options |= {
            "position_bias": position_bias,
            "time_bias": time_bias,
            "timestamps": timestamps,
        }
    weight = torch.randn(q.shape[0], HEADS, D_V, dtype=torch.float64)
    oracle = gradients(lambda: naive(q, k, v, lengths, visible=visible, **options), leaves, weight)

    def make_plan(**limits):
        return plan_attention(
            lengths,
            HEADS,
            candidate_counts=options.get("candidate_counts"),
            timestamps=options.get("timestamps"),
            buckets=BUCKETS if biases else 0,
            distances=biases,
            visible=visible,
            **limits,
        )

    listed = make_plan()
    assert listed.pairs is not None and not listed.groups.groups
    monkeypatch.setattr(attention_plan, "LISTED_SCORES", -1)
    whole = make_plan() if visible else None  # made by the call
    plans = [listed, whole, make_plan(budget=150, rows=4)]
    monkeypatch.setattr(attention_plan, "RELATION_BUDGET", -1)
    plans.append(make_plan(budget=150, rows=4))
    assert all(plan.pairs is None for plan in plans[2:]) and not plans[3].kept
    for plan in plans:
        ours = gradients(
            lambda plan=plan: hstu_attention(
                q, k, v, lengths, scale_length=SCALE, alpha=ALPHA, plan=plan, **options
            ),
            leaves,
            weight,
        )
        for mine, expected in zip(ours, oracle, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-13)


def test_gradcheck():
    leaves, lengths, timestamps = inputs([4, 0, 6])
    counts = torch.tensor([1, 0, 2])

    def function(q, k, v, position_bias, time_bias):
        return hstu_attention(
            q, k, v, lengths, scale_length=SCALE, alpha=ALPHA, candidate_counts=counts,
            position_bias=position_bias, time_bias=time_bias, timestamps=timestamps,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("listed", [False, True])
def test_lower_precision_follows_the_inputs(dtype, tolerance, listed, monkeypatch):
    if not listed:
        monkeypatch.setattr(attention_plan, "LISTED_SCORES", -1)
    leaves, lengths, timestamps = inputs([9, 0, 30, 17], dtype)
    options = {"scale_length": SCALE, "alpha": ALPHA, "timestamps": timestamps}
    q, k, v, position_bias, time_bias = leaves
    weight = torch.randn(q.shape[0], HEADS, D_V)
    call = lambda *x: hstu_attention(*x[:3], lengths, position_bias=x[3], time_bias=x[4], **options)  # noqa: E731
    ours = gradients(lambda: call(*leaves), leaves, weight.to(dtype))
    assert all(x.dtype == dtype for x in ours)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    oracle = gradients(lambda: call(*exact), exact, weight.to(dtype).double())
    for mine, expected in zip(ours, oracle, strict=True):
        assert (mine.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("listed", [False, True])
def test_autocast_does_not_reach_inside(listed, monkeypatch):
    if not listed:
        monkeypatch.setattr(attention_plan, "LISTED_SCORES", -1)
    leaves, lengths, _ = inputs([5, 20], torch.float32)
    q, k, v, *_ = leaves
    weight = torch.randn(q.shape[0], HEADS, D_V)
    call = lambda: hstu_attention(q, k, v, lengths, scale_length=SCALE, alpha=ALPHA)  # noqa: E731
    plain = gradients(call, leaves, weight)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gradients(call, leaves, weight)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_keeps_no_scores_for_backward():
    leaves, lengths, _ = inputs([700, 20], torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        hstu_attention(*leaves[:3], lengths, scale_length=SCALE, alpha=ALPHA).sum().backward()
    assert max(saved) <= 720 * HEADS * D_QK


def test_no_tile_exceeds_the_budget():
    lengths = torch.tensor([1000, 3, 90, 90, 90, 0, 17])
    plan = plan_attention(lengths, HEADS, budget=5000, rows=64)
    for number, group in enumerate(plan.groups.groups):
        tiles = list(plan.tiles(number))
        assert [t.stop for t in tiles[1:]] == [t.start for t in tiles[:-1]]
        assert tiles[-1].start == 0 and tiles[0].stop == group.length
        assert all(len(group) * HEADS * (t.stop - t.start) * t.stop <= 5000 for t in tiles)


class TestBadInput:
    def refused(self, message, **changes):
        leaves, lengths, _ = inputs([2, 3])
        arguments = dict(zip("qkv", leaves, strict=False)) | {
            "lengths": lengths,
            "scale_length": SCALE,
            "alpha": ALPHA,
        }
        with pytest.raises(ValueError, match=message):
            hstu_attention(**(arguments | changes))

    def test_shapes(self):
        self.refused("do not fit", k=torch.zeros(5, HEADS, D_QK + 1, dtype=torch.float64))
        self.refused("do not fit", v=torch.zeros(4, HEADS, D_V, dtype=torch.float64))
        self.refused("do not fit", q=torch.zeros(5, 4))

    def test_dtypes(self):
        self.refused("floating dtype", k=torch.zeros(5, HEADS, D_QK))
        self.refused("int64", lengths=torch.tensor([2, 3], dtype=torch.int32))
        self.refused(
            "candidate_counts must be int64",
            candidate_counts=torch.tensor([1, 1], dtype=torch.int32),
        )
        self.refused(
            "timestamps must be int64", time_bias=torch.zeros(4), timestamps=torch.zeros(5)
        )

    def test_sums(self):
        for wrong in ([2, 4], [-1, 6], [5, 1]):
            with pytest.raises(ValueError):
                leaves, _, _ = inputs([2, 3])
                hstu_attention(*leaves[:3], torch.tensor(wrong), scale_length=SCALE, alpha=ALPHA)
        self.refused("4 candidates among 3 tokens", candidate_counts=torch.tensor([0, 4]))

    def test_biases(self):
        self.refused("up to 2 apart", position_bias=torch.zeros(2, dtype=torch.float64))
        self.refused("needs timestamps", time_bias=torch.zeros(4))
        self.refused("1-d", position_bias=torch.zeros(2, 2))
        self.refused("scale_length", scale_length=0)

    def test_devices(self):
        self.refused(
            "different devices", k=torch.zeros(5, HEADS, D_QK, dtype=torch.float64, device="meta")
        )

    def test_plan_of_something_else(self):
        self.refused("lengths add up to 4", plan=plan_attention(torch.tensor([2, 2]), HEADS))
        self.refused("heads", plan=plan_attention(torch.tensor([2, 3]), HEADS + 1))
        self.refused(
            "distances=True",
            plan=plan_attention(torch.tensor([2, 3]), HEADS),
            position_bias=torch.zeros(9),
        )


LENGTH_LISTS = st.lists(st.integers(0, 60), max_size=40)


@given(LENGTH_LISTS, st.integers(1, 20000), st.integers(0, 3000))
@settings(max_examples=200, deadline=None)
def test_groups_hold_every_sample_once_within_their_limits(lengths, budget, overhead):
    host = np.array(lengths, dtype=np.int64)
    groups = plan_groups(lengths, square, budget, overhead)
    assert sorted(i for group in groups for i in group.tolist()) == np.flatnonzero(host).tolist()
    for group in groups:
        longest = host[group].max()
        assert len(group) == 1 or len(group) * longest**2 <= budget
        assert len(group) * longest**2 - (host[group] ** 2).sum() <= overhead
    flat = [i for group in groups for i in group.tolist()]
    assert flat == sorted(flat, key=lambda i: (-lengths[i], i))  # stable, longest first


def test_groups_of_a_heavy_tail_cost_about_the_sum_of_squares():
    lengths = np.minimum(np.random.default_rng(0).lognormal(4.6, 1.0, 512).astype(np.int64), 5000)
    groups = plan_groups(lengths, square, 1 << 20)
    padded = sum(len(g) * lengths[g].max() ** 2 for g in groups)
    assert padded < 1.1 * (lengths**2).sum() < 0.2 * len(lengths) * lengths.max() ** 2
    assert len(groups) < 100


@given(
    LENGTH_LISTS | st.builds(lambda n, length: [length] * n, st.integers(1, 5), st.integers(1, 9)),
    st.integers(1, 5000),
)
@settings(max_examples=50, deadline=None)
def test_pad_and_unpad(lengths, budget):
    groups = Groups.of(torch.tensor(lengths, dtype=torch.int64), square, budget)
    values = torch.arange(1.0, 1 + 2 * sum(lengths)).view(-1, 2).requires_grad_()
    parts = list(torch.split(values, lengths)) if lengths else []
    padded = groups.pad(values)
    for group, block in zip(groups.groups, padded, strict=True):
        assert torch.equal(block, group.pad(values))
        for row, sample in zip(block, group.samples.tolist(), strict=True):
            assert torch.equal(row[: lengths[sample]], parts[sample])
            assert not row[lengths[sample] :].any()
    back = groups.unpad(padded, values)
    assert torch.equal(back, values)
    placed = torch.zeros_like(values)
    for group, block in zip(groups.groups, padded, strict=True):
        group.put(placed.detach(), block.detach())
    assert torch.equal(placed, values)
    if padded:
        (grad,) = torch.autograd.grad((back * values.detach()).sum(), values)
        assert torch.equal(grad, values.detach())
