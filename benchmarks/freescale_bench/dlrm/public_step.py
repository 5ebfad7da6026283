"""Steps of the public DlrmHSTU with its Triton kernels: forward, backward and Adam of everything
but the tables, whose rows are inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from freescale.batch import SequenceBatch
from freescale_bench.common.results import Row
from freescale_bench.dlrm.measure import ADAM, Data, time_steps
from freescale_bench.dlrm.shapes import Shape
from freescale_bench.dlrm.stand_ins import stand_in_for_torchrec


def measure_public(shape: Shape, data: Sequence[Data], folder: Path, device: str) -> list[Row]:
    stand_in_for_torchrec()
    from freescale_bench.dlrm.public import build_public

    on_gpu = device == "cuda"
    model = build_public(shape, folder, device=device, bf16=on_gpu, tables=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=on_gpu, **ADAM)
    rows = []
    for each in data:
        windows, more = time_steps(_train(shape, model, optimizer, each, device), on_gpu)
        row = {"arm": "public, without tables", **each.describe(shape, windows), **more}
        rows.append(row)
    return rows


def _train(
    shape: Shape, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, device: str
) -> Iterator[None]:
    from freescale_bench.dlrm.public import run_public

    drawn: dict[int, Tensor] = {}  # rows of as many ids, by number: they are leaves

    def read(_: str, ids: Tensor) -> Tensor:
        count = len(ids)
        if count not in drawn:
            drawn[count] = 0.02 * torch.randn(count, shape.width, device=device)
        return drawn[count].detach().requires_grad_()

    moved: list[SequenceBatch] = [batch.to(device) for batch in data.batches]
    for batch in (moved[n % len(moved)] for n, _ in enumerate(data.repeat())):
        optimizer.zero_grad(set_to_none=True)
        loss, _ = run_public(model, shape, batch, read)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield
