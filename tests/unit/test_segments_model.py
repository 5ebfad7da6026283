"""HSTU over segments: the encoder against its definition; nothing changes without segments;
remembered ones score the same."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from helpers import segments_cases
from helpers.model_cases import (
    ACTIONS,
    ITEMS,
    TASKS,
    WIDTH,
    assert_equal,
    batch_of,
    losses_and_gradients,
)
from torch.nn import functional as F

from freescale.batch import Jagged, SequenceBatch
from freescale.config import DataConfig, ModelConfig, RunConfig
from freescale.models import HSTU, Ranking, Retrieval, SegmentedHSTU, split_history
from freescale.random import derive, draw_keep_mask
from freescale.train.build import build_balancer, build_module

OPTIONS = dict(
    width=WIDTH,
    layers=2,
    heads=2,
    d_qk=3,
    d_v=5,
    max_length=14,
    position_bias=True,
    time_bias=True,
    num_time_buckets=20,
)
WEIGHED = dict(segment_weight=1.75, segment_pooling=True)
LENGTHS, COUNTS = [5, 0, 1, 13, 4, 8], [3, 2, 0, 5, 1, 2]


def model_of(kind, dtype=torch.float64, segment=4, tokens=2, **changes):
    torch.manual_seed(0)
    cut = {} if segment is None else {"segment": segment, "segment_tokens": tokens}
    encoder = (HSTU if segment is None else SegmentedHSTU)(
        **(OPTIONS | {"dropout": 0.3} | cut | changes)
    )
    if kind == "retrieval":
        return (
            Retrieval(encoder, num_items=ITEMS, num_actions=ACTIONS, temperature=0.3)
            .to(dtype)
            .train()
        )
    return Ranking(encoder, num_items=ITEMS, num_actions=ACTIONS, tasks=TASKS).to(dtype).train()


def defined(encoder, x, candidates, times, key):
    """One sample through the encoder, every pair of rows by itself: x [length, width] -> [length,
    width]."""
    segments, length = encoder.segments, len(x)
    history = length - candidates
    mask = torch.from_numpy(segments_cases.visible(length, candidates, segments))
    rows, at, events = [], [], []
    for event in range(length):
        place = min(event, history)
        events.append(len(rows))
        rows.append(x[event] * WIDTH**0.5 + encoder.position[place])
        at.append(
            (
                place // segments.length if event < history else history // segments.length,
                times[event],
            )
        )
        if event < history and (event + 1) % segments.length == 0:
            pooled = (
                torch.stack([rows[row] for row in events[-segments.length :]]).sum(0)
                * segments.length**-0.5
            )
            start = encoder.position[event + 1] + (pooled if encoder.segment_pooling else 0)
            rows += [token + start for token in encoder.summaries]
            at += [(event // segments.length, times[event])] * segments.tokens
    rows = torch.stack(rows)
    total = len(rows)
    if encoder.training:
        kept = draw_keep_mask(derive(key, torch.arange(total), 1 << 20), WIDTH, 0.7)
        rows = rows * kept / 0.7
    place = torch.arange(total).clamp(max=total - candidates)
    same = torch.tensor([[a[0] == b[0] for b in at] for a in at])
    elapsed = torch.tensor(
        [[max(1, int(a[1] - b[1])) for b in at] for a in at], dtype=torch.float64
    )
    for layer in encoder.layers:
        parts = F.silu(
            layer.projection(
                F.layer_norm(rows, (WIDTH,), layer.input_norm.weight, layer.input_norm.bias, 1e-6)
            )
        )
        u, v, q, k = parts.split([10, 10, 6, 6], 1)
        scores = torch.einsum("ihd,jhd->hij", q.view(-1, 2, 3), k.view(-1, 2, 3)) * 3**-0.5
        bucket = elapsed.log().div(0.301).clamp(max=20).to(torch.int64)
        bias = (
            layer.position_bias[
                (place[:, None] - place[None]).clamp(0, layer.position_bias.numel() - 1)
            ]
            + layer.time_bias[bucket]
        )
        weights = F.silu(scores + bias * same) * mask / encoder.max_length
        weights = torch.where(same, weights, weights * encoder.segment_weight)
        attended = torch.einsum("hij,jhd->ihd", weights, v.view(-1, 2, 5)).flatten(1)
        gated = (
            F.layer_norm(
                attended, (10,), layer.attention_norm.weight, layer.attention_norm.bias, 1e-6
            )
            * u
        )
        if encoder.training:
            kept = draw_keep_mask(derive(key, torch.arange(total), layer.number), 10, 0.7)
            gated = gated * kept / 0.7
        rows = rows + layer.output(gated)
    return rows[events]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("changes", [{}, WEIGHED], ids=["plain", "weighed and pooled"])
def test_the_encoder_is_its_definition(training, changes):
    encoder = model_of("ranking", **changes).encoder.train(training)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(LENGTHS) + torch.tensor(COUNTS)
    x = torch.randn(
        int(lengths.sum()), WIDTH, generator=generator, dtype=torch.float64
    ).requires_grad_()
    times = torch.randint(0, 900, (len(x),), generator=generator).cumsum(0)
    keys = torch.arange(len(lengths)) + 7
    out = encoder(x, lengths, keys, times, torch.tensor(COUNTS))
    expected = torch.cat(
        [
            defined(encoder, part, count, time, key)
            for part, count, time, key in zip(
                x.split(lengths.tolist()), COUNTS, times.split(lengths.tolist()), keys
            )
            if len(part)
        ]
    )
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    leaves = [x, *encoder.parameters()]
    for mine, wanted in zip(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["retrieval", "ranking"])
class TestBothHeads:
    def test_without_a_full_segment_the_plain_model_to_the_bit(self, kind):
        plain, cut = (
            model_of(kind, segment=None),
            model_of(kind, segment=14, tokens=1, max_length=14),
        )
        assert set(cut.state_dict()) - set(plain.state_dict()) == {"encoder.summaries"}
        assert not set(plain.state_dict()) - set(cut.state_dict())
        plain.load_state_dict(
            {n: v for n, v in cut.state_dict().items() if n != "encoder.summaries"}
        )
        batch = batch_of(LENGTHS, COUNTS)
        mine, expected = losses_and_gradients(cut, batch), losses_and_gradients(plain, batch)
        assert not mine.pop("encoder.summaries").any()
        assert all(torch.equal(mine[name], expected[name]) for name in expected)

    def test_the_other_parameters_are_drawn_as_without_segments(self, kind):
        plain, cut = (
            model_of(kind, segment=None).encoder.state_dict(),
            model_of(kind).encoder.state_dict(),
        )
        assert all(torch.equal(cut[name], value) for name, value in plain.items())

    def test_a_batch_is_the_sum_of_its_samples(self, kind):
        model, batch = model_of(kind), batch_of(LENGTHS, COUNTS)
        singles = [losses_and_gradients(model, batch.slice(i, i + 1)) for i in range(len(batch))]
        expected = {name: sum(s[name] for s in singles) for name in singles[0]}
        assert expected["encoder.summaries"].abs().max() > 0
        assert_equal(
            losses_and_gradients(model, batch.select(torch.randperm(len(batch)))), expected
        )

    def test_recomputing_changes_nothing(self, kind):
        batch = batch_of(LENGTHS, COUNTS)
        first, second = (
            losses_and_gradients(model_of(kind, checkpoint=on), batch) for on in (False, True)
        )
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_a_step_reads_no_device(self, kind, monkeypatch):
        # not known of this device
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        model, there = model_of(kind, **WEIGHED).to("meta"), batch_of(LENGTHS, COUNTS).to("meta")
        sum(model(there).values()).backward()

    @pytest.mark.parametrize("changes", [{}, WEIGHED], ids=["plain", "weighed and pooled"])
    @pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
    def test_remembered_segments_score_like_the_whole_history(
        self, kind, dtype, tolerance, changes
    ):
        model = model_of(kind, dtype, **changes).eval()
        batch = batch_of([5, 0, 1, 13, 4, 8, 9], [3, 2, 0, 5, 1, 2, 1])
        score = model.encode_queries if kind == "retrieval" else model.predict
        whole = score(batch)
        old, recent = split_history(batch, 4)
        assert old.sequences["history"].lengths.tolist() == [4, 0, 0, 12, 0, 4, 8]
        memory = model.compress(old)
        assert memory.segments.tolist() == [1, 0, 0, 3, 0, 1, 2]
        assert all(
            k.shape == (7 * 2, 2, 3) and v.shape == (7 * 2, 2, 5)
            for k, v in zip(memory.keys, memory.values, strict=True)
        )
        torch.testing.assert_close(score(recent, memory), whole, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(score(recent), whole, rtol=1e-3)  # what is remembered matters
        # segment by segment: the first of each, then the next of what is left
        start = [min(4, n) for n in old.sequences["history"].lengths.tolist()]
        first, rest = self.cut(old, start)
        again = model.compress(rest, model.compress(first))
        for mine, wanted in zip(
            again.keys + again.values, memory.keys + memory.values, strict=True
        ):
            torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance)
        # recent events may fill segments of their own
        later = self.cut(batch, start)[1]
        torch.testing.assert_close(
            score(later, model.compress(first)), whole, rtol=tolerance, atol=tolerance
        )

    @staticmethod
    def cut(batch, events):
        """The first `events` [samples] of the histories, and everything else."""
        parts = ({}, {})
        for name in ("history", "actions", "timestamps"):
            pieces = batch.sequences[name].values.split(batch.sequences[name].lengths.tolist())
            for part, values in zip(parts, zip(*((p[:n], p[n:]) for p, n in zip(pieces, events)))):
                part[name] = Jagged(torch.cat(values), torch.tensor([len(v) for v in values]))
        rest = SequenceBatch(
            batch.sequences | parts[1], batch.candidates, batch.dense, keys=batch.keys
        )
        return SequenceBatch(parts[0], keys=batch.keys), rest


class TestBadInput:
    def test_options(self):
        for changes, message in (
            (dict(segment=15), "longer than the longest history, max_length=14"),
            (dict(segment=3, tokens=4), "1 to 3 tokens, not 4"),
            (dict(segment=-1), "at least 1 event"),
            (dict(tokens=0), "not 0"),
            (
                dict(segment_weight=2.5),
                ("at most the 2 events that it stands for, .* not segment_weight=2.5"),
            ),
            (dict(segment_weight=0.0), "not segment_weight=0.0"),
        ):
            with pytest.raises(ValueError, match=message):
                model_of("retrieval", **changes)

    def test_configurations(self):
        def of(max_length=20, **model):
            return RunConfig(DataConfig(data="x", max_length=max_length), ModelConfig(**model))

        for changes, message in (
            (dict(segment=21), "--segment 21 is longer than the longest history, --max-length 20"),
            (
                dict(segment=3, segment_tokens=4),
                ("--segment-tokens 4 are more than the events of a segment, --segment 3"),
            ),
            (dict(segment=-2), "--segment must be at least 1, got -2"),
            (dict(segment=5, segment_tokens=-1), "--segment-tokens must be at least 1, got -1"),
            (
                dict(segment=6, segment_tokens=4, segment_weight=2.0),
                ("--segment-weight 2 is more than the 1.5 events"),
            ),
        ):
            with pytest.raises(ValueError, match=message):
                of(**changes)
        config = of(segment=8, segment_tokens=3, segment_weight=2.5, segment_pooling=True)
        assert RunConfig.from_json(config.to_json()) == config
        encoder = build_module(config, 9, 0).encoder
        assert encoder.segment_weight == 2.5 and encoder.segment_pooling
        assert (
            isinstance(encoder, SegmentedHSTU)
            and encoder.segments == build_balancer(config, torch.device("cpu")).segments
        )
        assert (
            type(build_module(of(), 9, 0).encoder) is HSTU
            and build_balancer(of(), torch.device("cpu")).segments is None
        )

    def test_batches(self):
        model = model_of("retrieval").eval()
        with pytest.raises(
            ValueError, match=("sample 1 has 1 events after its last full segment of 4")
        ):
            model.compress(batch_of([4, 5], [0, 0]))
        memory = model.compress(batch_of([4, 8], [0, 0]))
        with pytest.raises(ValueError, match="memory is of 2 samples, the batch has 1"):
            model.encode_queries(batch_of([4], [0]), memory)
        with pytest.raises(ValueError, match="a history has 15 events"):
            model.encode_queries(batch_of([1, 7], [0, 0]), memory)
        with pytest.raises(ValueError, match="a history has 15 events"):
            model.encode_queries(batch_of([15], [0]))
        plain = model_of("retrieval", segment=None)
        for call in (
            lambda: plain.compress(batch_of([4], [0])),
            lambda: plain.encode_queries(batch_of([4, 1], [0, 0]), memory),
        ):
            with pytest.raises(ValueError, match="only an encoder with segments"):
                call()
        with pytest.raises(ValueError, match="dropout needs keys"):
            batch = batch_of([9], [0])
            model.train()(SequenceBatch(batch.sequences, dense=batch.dense))
