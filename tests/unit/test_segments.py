"""Histories cut into segments: visibility against the definition pair by pair, the layout, costs,
and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import segments_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel, features
from freescale.balance.partitioners.greedy import greedy
from freescale.kernels.summary_attention import reference
from freescale.kernels.summary_attention import triton as twin
from freescale.kernels.summary_attention.plan import SummaryPlan
from freescale.kernels.summary_attention.triton import plan_tiles
from freescale.models.segments.arrangement import arrange_rows
from freescale.segments import Segments

SMALL = {
    name: options
    for name, options in segments_cases.CASES.items()
    if "dtype" not in options and "widths" not in options
}


def oracle(rows, case, q, k, v, old_k, old_v, position_bias, time_bias, timestamps):
    """One query and one key at a time; biases only inside a segment."""
    lengths, counts, known = segments_cases.SAMPLES.get(case["samples"], case["samples"])
    segments, out, row, old = rows.plan.segments, [], 0, 0
    for length, candidates, before in zip(lengths, counts, known, strict=True):
        mask = segments_cases.visible(length, candidates, segments, before)
        remembered = before * segments.tokens
        history = len(mask) - candidates
        for i in range(len(mask)):
            total = v.new_zeros(v.shape[1:])
            for j in np.flatnonzero(mask[i]):
                at = j - remembered
                key, value = (
                    (k[row + at], v[row + at]) if at >= 0 else (old_k[old + j], old_v[old + j])
                )
                score = (q[row + i] * key).sum(-1) * 0.2
                # the segment's first row; candidates belong to the open part
                inside = at >= min(i, history) // segments.period * segments.period
                if inside and position_bias is not None:
                    score = score + position_bias[min(i, history) - min(at, history)]
                    elapsed = max(1, int(timestamps[row + i] - timestamps[row + at]))
                    score = (
                        score
                        + time_bias[
                            min(math.floor(math.log(elapsed) / 0.301), time_bias.numel() - 1)
                        ]
                    )
                total = total + (score * torch.sigmoid(score))[:, None] * value
            out.append(total / 50)
        row, old = row + len(mask), old + remembered
    return torch.stack(out) if out else v * 0


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("case", [name for name in SMALL if name != "more than a tile"])
def test_attention_equals_the_definition(case, biases, monkeypatch):
    """Outputs and all gradients in float64, of parts plus summaries, which are in one group or in
    many."""
    rows, leaves = segments_cases.drawn(**SMALL[case], widths=(3, 2))
    generator = torch.Generator().manual_seed(2)
    extra = {}
    if biases:
        extra["position_bias"] = torch.randn(
            20, generator=generator, dtype=torch.float64
        ).requires_grad_()
        extra["time_bias"] = torch.randn(
            9, generator=generator, dtype=torch.float64
        ).requires_grad_()
        extra["timestamps"] = torch.randint(-2, 40, (rows.plan.rows,), generator=generator).cumsum(
            0
        )
    parameters = [*leaves, *(x for x in extra.values() if x.requires_grad)]
    weight = torch.randn(leaves[2].shape, generator=generator, dtype=torch.float64)

    def gradients(out):
        return [
            out.detach(),
            *torch.autograd.grad(
                (out * weight).sum(), parameters, allow_unused=True, materialize_grads=True
            ),
        ]

    named = {"position_bias": None, "time_bias": None, "timestamps": None} | extra
    expected = gradients(
        oracle(rows, SMALL[case], *leaves, **named) + 0 * sum(x.sum() for x in parameters)
    )
    for budget in (reference.TILE_BUDGET, 1):
        monkeypatch.setattr(reference, "TILE_BUDGET", budget)
        for mine, wanted in zip(
            gradients(segments_cases.segmented(rows, *leaves, segments_cases.REFERENCE, **extra)),
            expected,
        ):
            torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-13)


def test_keeps_no_scores_for_backward():
    rows, leaves = segments_cases.drawn(([900], [0], [0]), 100, 10, widths=(4, 4))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        segments_cases.segmented(rows, *leaves, segments_cases.REFERENCE).sum().backward()
    assert max(saved) <= rows.plan.rows * 4


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_lower_precision_follows_the_inputs(dtype, tolerance):
    rows, leaves = segments_cases.drawn("known", 5, 2, widths=(6, 4))
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ours, oracle = (
        segments_cases.segmented(rows, *inputs, segments_cases.REFERENCE)
        for inputs in (leaves, exact)
    )
    grads, wanted = (
        torch.autograd.grad(ours.sum(), leaves),
        torch.autograd.grad(oracle.sum(), exact),
    )
    for mine, expected in zip([ours, *grads], [oracle, *wanted], strict=True):
        assert (
            mine.dtype == dtype
            and (mine.double() - expected).abs().max() <= tolerance * expected.abs().max()
        )


SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(0, 3)), max_size=6)


@given(SIZES, st.integers(1, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_layout_blocks_tiles_and_pairs_are_those_of_the_definition(sizes, segment, data):
    segments = Segments(segment, data.draw(st.integers(1, segment)))
    history, counts, known = (np.array([s[n] for s in sizes], np.int64) for n in range(3))
    rows = arrange_rows(
        segments, torch.from_numpy(history + counts), torch.from_numpy(counts), None, known
    )
    assert sorted(rows.order.tolist()) == list(range(rows.plan.rows)) and rows.plan.rows == int(
        rows.parts.sum()
    )
    assert rows.plan.summaries == int(((known + history // segment) * segments.tokens).sum())
    masks = [
        segments_cases.visible(h + c, c, segments, k)
        for h, c, k in zip(history, counts, known, strict=True)
    ]
    own = [segments_cases.visible(h + c, c, segments) for h, c in zip(history, counts, strict=True)]
    assert [mask.sum() for mask in own] == segments.count_pairs(history, counts).tolist()
    # parts and blocks together see what the masks allow
    seen = sum(
        int((n - c) * (n - c + 1) // 2 + c * (n - c + 1))
        for n, c in zip(rows.parts.tolist(), rows.candidate_counts.tolist())
    )
    assert seen + int((rows.plan.find_blocks()[:, 1] * rows.plan.find_blocks()[:, 3]).sum()) == sum(
        int(mask.sum()) for mask in masks
    )
    for of, goal in (
        ("rows", rows.plan.find_blocks()[:, :2]),
        ("summaries", np.stack([rows.plan.starts[1], rows.plan.counts], 1)),
    ):
        table = plan_tiles(rows.plan, of, 4)
        place, end = (
            (0, table[:, 1]) if of == "rows" else (2, (table[:, 3] + table[:, 4]) * segments.tokens)
        )
        held = [
            t[place] + t[5] + n
            for t, stop in zip(table, end, strict=True)
            for n in range(min(4, stop - t[5]))
        ]
        assert len(set(held)) == len(held)
        used = rows.plan.lengths > 0 if of == "summaries" else slice(None)
        assert set(held) == {first + n for first, count in goal[used] for n in range(count)}


def test_events_keep_their_positions_and_summaries_stand_where_the_next_segment_begins():
    rows = arrange_rows(Segments(3, 2), torch.tensor([8]), torch.tensor([2]), None, np.array([4]))
    assert rows.event_positions.tolist() == [12, 13, 14, 15, 16, 17, 18, 18]
    assert rows.events.tolist() == [0, 1, 2, 5, 6, 7, 10, 11]
    assert rows.summaries.tolist() == [3, 4, 8, 9] and rows.summary_positions.tolist() == [
        15,
        15,
        18,
        18,
    ]
    assert rows.last_events.tolist() == [2, 2, 5, 5] and rows.longest_history == 18


class TestCost:
    def test_features_count_visible_pairs_and_summaries(self):
        segments = Segments(4, 2)
        lengths, candidates = np.array([0, 1, 4, 5, 13]), np.array([0, 2, 0, 1, 0])
        rows = features(lengths, candidates, segments)
        pairs = [
            segments_cases.visible(n + c, c, segments).sum()
            for n, c in zip(lengths, candidates, strict=True)
        ]
        assert rows[:, 0].tolist() == [2 * n for n in pairs]
        assert rows[:, 1].tolist() == lengths.tolist() and rows[:, 2].tolist() == [0, 2, 2, 3, 6]

    def test_a_long_history_costs_less_in_segments(self):
        cost = CostModel.of_hstu(width=64, layers=2, heads=2, d_qk=32, d_v=32)
        length = np.array([5000])
        assert cost(length, segments=Segments(250, 4)) < cost(length) / 5
        assert cost(np.array([249]), segments=Segments(250, 4)) == pytest.approx(
            cost(np.array([249])), rel=0.01
        )

    def test_the_balancer_deals_by_it(self):
        """Without segments one long sample outweighs three shorter ones; with them it does not.
        Summaries count under the cap."""
        table = np.array([[300, 0, 300], [100, 0, 100], [100, 0, 100], [100, 0, 100]])
        cost, home = CostModel(1.0, 0.0), np.zeros(4, np.int64)
        plain = Balancer(greedy, cost).plan(0, table, home, 2)
        cut = Balancer(greedy, cost, segments=Segments(10, 1)).plan(0, table, home, 2)
        assert plain.loads.max() / plain.loads.min() == pytest.approx(3.0)
        assert cut.loads.max() / cut.loads.min() < plain.loads.max() / plain.loads.min() / 1.2
        with pytest.raises(ValueError, match="330 tokens"):
            Balancer(greedy, cost, cap=320, segments=Segments(10, 1)).plan(0, table, home, 2)


class TestBadInput:
    def test_segments(self):
        for length, tokens, message in (
            (0, 1, "at least 1 event"),
            (-3, 1, "at least 1"),
            (4, 5, "1 to 4 tokens"),
            (4, 0, "not 0"),
        ):
            with pytest.raises(ValueError, match=message):
                Segments(length, tokens)

    @pytest.mark.parametrize(
        "function",
        [
            pytest.param(reference.summary_attention, id="reference"),
            pytest.param(twin.summary_attention, id="triton"),
        ],
    )
    def test_shapes_and_plans(self, function):
        plan = SummaryPlan(Segments(3, 1), np.array([6]), np.array([1]), np.array([0]))
        q, k = torch.zeros(6, 2, 32), torch.zeros(1, 2, 32)
        for message, *inputs in (
            ("do not fit", q[0], k, k),
            ("do not fit", q[:, :1], k, k),
            ("one floating dtype", q.double(), k, k),
            ("1 summaries, not 6 and 2", q, torch.cat([k, k]), torch.cat([k, k])),
            ("different devices", q, k.to("meta"), k),
        ):
            with pytest.raises(ValueError, match=message):
                function(*inputs, plan, scale_length=9, alpha=0.1)
        with pytest.raises(ValueError, match="scale_length"):
            function(q, k, k, plan, scale_length=0, alpha=0.1)
        with pytest.raises(ValueError, match="heads .* wide"):
            twin.summary_attention(q, k, k.repeat(1, 1, 5), plan, scale_length=9, alpha=0.1)
