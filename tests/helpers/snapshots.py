"""Snapshots of a model in this process, without a holder or threads."""

from __future__ import annotations

from typing import Any

from freescale.train.state.contents import MemoryContents
from freescale.train.state.copies import StateCopies
from freescale.train.state.memory import StateFile
from freescale.train.state.restore import load_snapshot


class TakenSnapshots:
    """`own`: the tensors of this rank's file, which each snapshot brings up to date; `copied`:
    those of its buddy's, which receives whole tables first and changes then."""

    def __init__(self) -> None:
        self._file, self._copy = StateFile("snapshots/0"), StateFile("snapshots/0")
        self.state: dict[str, Any] = {}

    def take(self, parallel, optimizer, step: int) -> None:
        copies = StateCopies(parallel.transport.device)
        contents = MemoryContents(copies=copies, file=self._file)
        contents.collect(parallel, optimizer, {"step": step})
        parallel.tables.lease.flush()
        contents.add_sharded()
        contents.write()
        self._file.seal({"step": step}, contents.tensors).close()
        self.own = self._file.tables | contents.tensors
        sent = self.own if contents.since is None else contents.list_changes()
        rest = self._copy.update(contents.since, sent, self._copy)
        self._copy.seal({"step": step}, rest).close()
        self.copied = self._copy.tables | rest
        self.state = contents.state

    def load(self, tensors, parallel, optimizer) -> None:
        """Restores one of the two."""

        def copy(name, to):
            to.copy_(tensors[name])

        load_snapshot(self.state, tensors, parallel, optimizer, copy)
