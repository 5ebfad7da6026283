"""Pooled features on two ranks against one process."""

from __future__ import annotations

import pytest
import torch
from helpers.pooled import BATCHES, train
from helpers.ranks import run_ranks
from helpers.toys import rank_slice
from helpers.training import assert_close

from freescale.balance.balancer import Balancer


def test_two_ranks_train_as_one_and_staged_as_serial():
    run_ranks(2, _compare_with_one_process)


def _compare_with_one_process(transport):
    expected_losses, expected = train(BATCHES[:5])
    mine = [rank_slice(batch, transport.rank, transport.world) for batch in BATCHES[:5]]
    options = {"transport": transport, "balance": Balancer("greedy", feature="f0")}
    losses, state = train(mine, schedule="serial", **options)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert_close(state, expected)
    again, staged = train(mine, schedule="staged", **options)
    assert again == losses
    assert [name for name in state if not torch.equal(staged[name], state[name])] == []
