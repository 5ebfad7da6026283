"""Tokens before a history, against attention written out pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from freescale.batch import HostSizes
from freescale.models import HSTU, SASRec
from freescale.models.hstu_layer import EPS

WIDTH, HEADS, LONGEST, COUNT = 8, 2, 12, 3
LENGTHS = [5, 0, 9, 1]


def make(kind, **more):
    torch.manual_seed(0)
    sizes = {"width": WIDTH, "layers": 2, "heads": HEADS, "max_length": LONGEST, "dropout": 0.0}
    sizes |= more
    if kind == "sasrec":
        return SASRec(**sizes).double()
    return HSTU(**sizes, num_time_buckets=16).double()


def draw(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    x = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    prefix = torch.randn(len(lengths), COUNT, WIDTH, generator=generator, dtype=torch.float64)
    times = torch.randint(0, 10_000, (tokens,), generator=generator).sort().values
    return x, prefix.requires_grad_(), times


def define(encoder, x, prefix, times, lengths, candidates):
    """HSTU, sample by sample, with all pairs of the prefix and the history."""
    outputs, begin = [], 0
    for sample, length in enumerate(lengths):
        events = x[begin : begin + length]
        time = times[begin : begin + length]
        begin += length
        history = length - candidates[sample]
        position = torch.arange(length).clamp(max=history)
        rows = torch.cat([prefix[sample], events]) * encoder.input_scale
        rows = rows + F.pad(encoder.position[position], (0, 0, COUNT, 0))
        total = COUNT + length
        seen = torch.ones(total, total).tril().bool()
        seen[:, COUNT + history :] = False
        seen |= torch.eye(total).bool()
        for layer in encoder.layers:
            normed = F.layer_norm(
                rows, (WIDTH,), layer.input_norm.weight, layer.input_norm.bias, EPS
            )
            u, v, q, k = F.silu(layer.projection(normed)).chunk(4, dim=1)
            q, k, v = (part.view(total, HEADS, -1).transpose(0, 1) for part in (q, k, v))
            scores = q @ k.transpose(1, 2) * layer.d_qk**-0.5
            apart = (position[:, None] - position).clamp(min=0)
            elapsed = (time[:, None] - time).clamp(min=1).double().log() / 0.301
            bias = layer.position_bias[apart] + layer.time_bias[elapsed.clamp(max=16).int()]
            scores[:, COUNT:, COUNT:] += bias
            weights = F.silu(scores).masked_fill(~seen, 0) / LONGEST
            mixed = (weights @ v).transpose(0, 1).reshape(total, -1)
            norm = layer.attention_norm
            gated = F.layer_norm(mixed, mixed.shape[1:], norm.weight, norm.bias, EPS) * u
            rows = rows + layer.output(gated)
        outputs.append(rows[COUNT:])
    return torch.cat(outputs)


@pytest.mark.parametrize("candidates", [[0, 0, 0, 0], [2, 0, 3, 0]])
def test_hstu_with_a_prefix(candidates):
    encoder = make("hstu")
    x, prefix, times = draw()
    lengths, counts = torch.tensor(LENGTHS), torch.tensor(candidates)
    found = encoder(x, lengths, None, times, counts if any(candidates) else None, prefix=prefix)
    expected = define(encoder, x, prefix, times, LENGTHS, candidates)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    leaves = [x, prefix, *encoder.parameters()]
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).double()
    mine = torch.autograd.grad((found * weight).sum(), leaves)
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_samples_see_their_own_prefix_alone(kind):
    encoder = make(kind)
    x, prefix, times = draw()
    lengths = torch.tensor(LENGTHS)
    whole = encoder(x, lengths, None, times, prefix=prefix)
    begin = 0
    for sample, length in enumerate(LENGTHS):
        part = slice(begin, begin + length)
        begin += length
        host = HostSizes(lengths[sample : sample + 1])
        alone = encoder(
            x[part], host.lengths, None, times[part], host=host, prefix=prefix[sample : sample + 1]
        )
        torch.testing.assert_close(alone, whole[part], rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        moved = prefix.clone()
        moved[0] = moved[0].flip(-1)  # a constant would be lost in the norm
        other = encoder(x, lengths, None, times, prefix=moved)
    changed = (other - whole).abs().amax(1) > 1e-9
    assert changed[: LENGTHS[0]].all() and not changed[LENGTHS[0] :].any()


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_a_prefix_is_causal_and_takes_no_position(kind):
    """A later event changes no earlier one, and a history of the longest length still fits."""
    encoder = make(kind)
    x, prefix, times = draw([LONGEST])
    lengths = torch.tensor([LONGEST])
    with torch.no_grad():
        before = encoder(x, lengths, None, times, prefix=prefix[:1])
        moved = x.clone()
        moved[-1] += 1
        after = encoder(moved, lengths, None, times, prefix=prefix[:1])
        plain = encoder(x, lengths, None, times)
    assert torch.equal(before[:-1], after[:-1]) and not torch.equal(before[-1], after[-1])
    assert not torch.allclose(before, plain)


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_dropout_follows_from_the_samples_key(kind):
    encoder = make(kind, dropout=0.3)
    x, prefix, times = draw()
    lengths, keys = torch.tensor(LENGTHS), torch.tensor([3, 4, 5, 6])
    first = encoder(x, lengths, keys, times, prefix=prefix)
    assert torch.equal(first, encoder(x, lengths, keys, times, prefix=prefix))
    alone = encoder(x[-1:], lengths[-1:], keys[-1:], times[-1:], prefix=prefix[-1:])
    torch.testing.assert_close(alone, first[-1:], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(first, encoder(x, lengths, keys + 1, times, prefix=prefix))
