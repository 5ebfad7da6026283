"""The counter-based generator: reference values, independence of order, distribution."""

from __future__ import annotations

import torch

from freescale.random import derive, draw_keep_mask, hash_name, integers, mix, normal, uniform


def _mix_in_python(x: int) -> int:
    x &= 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_mix_is_splitmix64():
    values = torch.tensor([0, 1, -1, 123456789, -(2**63), 2**63 - 1])
    assert [v % 2**64 for v in mix(values).tolist()] == [_mix_in_python(v) for v in values.tolist()]


def test_a_value_depends_on_its_key_alone():
    keys = derive(5, torch.arange(100))
    order = torch.randperm(100)
    assert torch.equal(derive(5, order), keys[order])
    assert torch.equal(draw_keep_mask(keys[order], 7, 0.5), draw_keep_mask(keys, 7, 0.5)[order])
    assert keys.unique().numel() == 100
    assert not torch.equal(derive(5, 1, 2), derive(5, 2, 1))
    assert hash_name("item") == hash_name("item") != hash_name("items")


def test_distributions():
    keys = derive(1, torch.arange(200_000))
    draws = uniform(keys)
    assert draws.min() >= 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.003
    assert uniform(torch.tensor([-1]), torch.float32) < 1
    for dtype in (torch.float32, torch.float64):
        gauss = normal(keys, dtype)
        assert gauss.dtype == dtype and torch.isfinite(gauss).all()
        assert (
            abs(gauss.mean()) < 0.01
            and abs(gauss.std() - 1) < 0.01
            and abs((gauss.abs() < 1).double().mean() - 0.6827) < 0.005
        )
    counts = torch.bincount(integers(keys, 7), minlength=7).double() / keys.numel()
    assert (counts - 1 / 7).abs().max() < 0.004
    kept = draw_keep_mask(keys[:20_000], 10, 0.8).double()
    assert abs(kept.mean() - 0.8) < 0.003 and (kept.mean(0) - 0.8).abs().max() < 0.012


def test_numbers_alone_a_few_and_many_are_mixed_alike():
    keys = derive(5, torch.arange(5000))  # more than numpy mixes
    assert torch.equal(derive(5, torch.arange(100)), keys[:100])
    seed, number = torch.tensor(5), torch.tensor(-7)
    for got, expected in (
        (derive(5, -7), derive(seed, number)),
        (derive(-5, 2**62, 3), derive(-seed, torch.tensor(2**62), torch.tensor(3))),
        (derive(5, keys[:3], 2), derive(seed, keys[:3], torch.tensor(2))),
    ):
        assert got.dtype == torch.int64 and torch.equal(got, expected)
    assert derive(5).tolist() == 5
