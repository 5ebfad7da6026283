"""Copies in pieces are the whole, on a CPU; those of a GPU are in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from freescale.train.snapshot import device_copies


@pytest.mark.parametrize("shape", [(), (0,), (8,), (33, 5), (64,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_pieces_are_the_whole(monkeypatch, shape, dtype):
    monkeypatch.setattr(device_copies, "_PIECE", 64)
    copies = device_copies.DeviceCopies()
    for _ in range(2):
        source = torch.randint(0, 2, shape).to(dtype)
        to = torch.ones_like(source)
        copies.copy_in_pieces(to, source)
        assert torch.equal(to, source)
