"""The verbs of a step that every group of tables has, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Unpack

from freescale.batch import SequenceBatch
from freescale.embedding.layout import Layout
from freescale.embedding.storage.api import Storage, UpdateOptions
from freescale.transport.api import Transport


class TableGroup(Protocol):
    """Tables of one width, dtype and optimizer, on all ranks. `Any` is what the group's own verb
    before it has returned. All verbs run on the caller's thread and stream; the first three are
    collectives over `transport`, if there is anything to exchange."""

    @property
    def layout(self) -> Layout: ...
    @property
    def rows(self) -> Storage: ...

    def request(self, batches: Sequence[SequenceBatch], transport: Transport) -> Any:
        """What some (micro-)batches read."""

    def fetch(self, request: Any, transport: Transport, train: bool) -> Any:
        """The requested rows, as `Rows`: the model can read them. With `train`, their step
        begins."""

    def collect(self, rows: Any, transport: Transport) -> Any:
        """The gradients of what has read the rows, where they are needed. Nothing can be read any
        more."""

    def update(
        self, collected: Any, transport: Transport, **options: Unpack[UpdateOptions]
    ) -> None:
        """Updates the rows by these gradients."""
