"""The last checkpoint of a model's tables, and whether the next one may hold the changes since."""

from __future__ import annotations

from dataclasses import dataclass

from freescale.embedding.tables import Tables
from freescale.train.checkpoint.chain import Intact
from freescale.train.checkpoint.delta import is_followed
from freescale.train.checkpoint.files import CheckpointFolder


@dataclass
class Parent:
    """A checkpoint since which changes of rows are marked."""

    step: int
    checksum: int  # of its state.json; rank 0's
    deltas: int  # since the last full one, itself included
    tables: Tables

    @staticmethod
    def of(step: int, checkpoint: Intact, tables: Tables) -> Parent:
        """What was loaded."""
        return Parent(step, checkpoint.checksum, len(checkpoint.ancestors), tables)

    def fits(self, tables: Tables, consumer: str, step: int, full_every: int) -> bool:
        """Whether the checkpoint of `step` may be a delta, as far as every rank knows."""
        return (
            self.tables is tables
            and self.step < step
            and self.deltas + 1 < full_every
            and is_followed(tables, consumer)
        )

    def is_in_place(self, files: CheckpointFolder) -> bool:
        """Whether the checkpoint is as it was saved, and still the last of the run. Rank 0's."""
        return files.steps()[-1:] == [self.step] and files.sum_state(self.step) == self.checksum
