"""The workload that benchmarks share: what its ids promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from freescale_bench.common.workload import Dense, Workload, make_batches

SKEWED = Workload(
    rows=60_000,
    width=8,
    samples=16,
    median_length=60,
    sigma=1.0,
    maximum_length=400,
    collisions=0.12,
    steps=8,
)


@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_consecutive_batches_share_what_was_asked(sigma, world):
    ranks = [make_batches(replace(SKEWED, sigma=sigma), rank, world) for rank in range(world)]
    whole = [
        np.concatenate([rank[step][0].numpy() for rank in ranks]) for step in range(SKEWED.steps)
    ]
    tokens = sum(map(len, whole))
    assert all(len(np.unique(ids)) == len(ids) for ids in whole)
    # the first follows the last
    again = sum(np.isin(ids, whole[step - 1]).sum() for step, ids in enumerate(whole))
    assert 0.11 < again / tokens < 0.13
    for step, ids in enumerate(whole[2:], 2):
        assert not np.isin(ids, whole[step - 2]).any()
    for rank in ranks:
        assert all(ids.numel() == lengths.sum() for ids, lengths, _ in rank)
    if sigma:
        assert max(int(lengths.max()) for _, lengths, _ in ranks[0]) > 3 * 60


def test_a_sample_does_not_depend_on_the_others():
    """HSTU behind the table: the loss of a batch is the sum of its samples'."""
    workload = replace(SKEWED, layers=1, inner=8, heads=2)
    dense = Dense(workload).double()
    lengths, labels = torch.tensor([5, 1, 9]), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    rows = torch.randn(15, 8, dtype=torch.float64)
    parts = rows.split(lengths.tolist())
    alone = sum(
        dense(part, length[None], label[None], length[None])
        for part, length, label in zip(parts, lengths, labels, strict=True)
    )
    torch.testing.assert_close(dense(rows, lengths, labels, lengths), alone, rtol=1e-12, atol=0)
