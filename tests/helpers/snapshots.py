"""Snapshots of a model in this process, without a holder or threads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from freescale.train.state.contents import MemoryContents
from freescale.train.state.copies import StateCopies
from freescale.train.state.memory import StateFile


class TakenSnapshots:
    """`own`: the tensors of this rank's file, which each snapshot brings up to date; `chain`: those
    that a buddy receives."""

    def __init__(self) -> None:
        self._file = StateFile("snapshots/0")
        self.chain: list[dict[str, Tensor]] = []
        self.state: dict[str, Any] = {}

    def take(self, parallel, optimizer, step: int) -> None:
        sends = "changes" if self.chain else "whole"
        copies = StateCopies(parallel.transport.device)
        contents = MemoryContents(copies=copies, file=self._file, spare=None, sends=sends)
        contents.collect(parallel, optimizer, {"step": step}, None)
        parallel.tables.lease.flush()
        contents.add_sharded()
        contents.write()
        self._file.seal({}, contents.tensors).close()
        self.own = self._file.tables | contents.tensors
        whole = {name: value.clone() for name, value in self.own.items()}
        self.chain.append(contents.list_changes() if self.chain else whole)
        self.state = contents.state
