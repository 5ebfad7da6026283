"""Rows in the memory of the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.storage.api import Counted, Recorder, Resolved, Storage, TableRange


class DeviceStorage(Storage):
    """All rows in the memory of the device that computes: slots are local rows."""

    def __init__(
        self, ranges: list[TableRange], size: int, optimizer: RowOptimizer, device: torch.device
    ) -> None:
        super().__init__(ranges, size, optimizer, device)
        self.weight, self.state = self._allocate(size, device)

    def resolve(self, rows: Tensor, ledger: Recorder, counted: Counted | None = None) -> Resolved:
        return Resolved(rows)

    def read(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return self.gather(rows, dtype)

    def get_tensors(self, name: str) -> dict[str, Tensor]:
        part = self._ranges[name].slice
        return {"rows": self.weight[part]} | {key: value[part] for key, value in self.state.items()}
