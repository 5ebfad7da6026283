"""Trains the public DlrmHSTU on batches of FreeScale, with tables and row-wise Adagrad in plain
torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.batch import SequenceBatch
from freescale.config import RunConfig
from freescale.train.build import choose_row_std
from freescale_bench.dlrm.shapes import Shape
from freescale_bench.dlrm.stand_ins import stand_in_for_torchrec


class Table:
    """Rows that are trained by row-wise Adagrad."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        self.weight = nn.Parameter(std * torch.randn(rows, width))
        self.squares = torch.zeros(rows)  # sum of each row's mean squared gradient

    def read(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, sparse=True)

    @torch.no_grad()
    def step(self, lr: float, eps: float) -> None:
        assert self.weight.grad is not None
        gradient = self.weight.grad.coalesce()  # several features read a table
        (rows,), values = gradient.indices(), gradient.values()
        self.squares[rows] += values.square().mean(1)
        self.weight[rows] -= lr * values / (self.squares[rows].sqrt() + eps)[:, None]
        self.weight.grad = None


def train_public(
    shape: Shape,
    config: RunConfig,
    folder: Path,
    data: Iterable[SequenceBatch],
    test: Iterable[SequenceBatch],
) -> Tensor:
    """Trains on `data` with the settings of a run. Returns a probability for each sample of
    `test`."""
    stand_in_for_torchrec()
    from freescale_bench.dlrm.public import build_public, list_tables, run_public

    settings = config.train
    assert settings.row_lr is not None and settings.row_eps is not None
    model = build_public(shape, folder, tables=False)
    std = choose_row_std(config)
    tables: dict[str, Table] = {}  # by feature
    for features, rows in list_tables(shape):
        tables |= dict.fromkeys(features, Table(rows, shape.width, std))
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=1e-8
    )

    def read(name: str, ids: Tensor) -> Tensor:
        return tables[name].read(ids)

    model.train()  # without dropout
    for batch in data:
        optimizer.zero_grad(set_to_none=True)
        loss, _ = run_public(model, shape, batch, read)
        loss.backward()  # type: ignore[no-untyped-call]
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        for table in set(tables.values()):
            table.step(settings.row_lr, settings.row_eps)
    with torch.no_grad():
        return torch.cat([run_public(model, shape, batch, read)[1] for batch in test])
