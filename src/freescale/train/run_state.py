"""The state of a run in its checkpoints: model, optimizer, pipeline and position in the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from freescale.data.loader import Histories
from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.pipeline import Pipeline
from freescale.train.checkpoint import Checkpoints


@dataclass
class RunState:
    """What a run needs to go on. `save` and `load` are collectives."""

    checkpoints: Checkpoints
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    pipeline: Pipeline
    data: Histories
    notes: list[str] = field(default_factory=list, init=False)  # about what was loaded
    _saved: int = field(default=0, init=False)  # the last step in a checkpoint

    def save(self, number: int) -> Path | None:
        """Saves the step just made, unless it is saved already.

        Args:
            number: of the last batch applied. The data goes on behind it; prefetching may have read
                further.

        Returns:
            The folder of a new checkpoint.

        Raises:
            NotFinite: if the model has diverged; nothing is saved then.
        """
        if self._saved == self.pipeline.steps:
            return None
        progress = {
            "step": self.pipeline.steps,
            "pipeline": self.pipeline.state_dict(),
            "data": self.data.state_dict(number + 1),
        }
        path = self.checkpoints.save(self.model, self.optimizer, progress, self.pipeline.reducer)
        self._saved = self.pipeline.steps
        return path

    def load(self) -> int:
        """Loads the last intact checkpoint and returns its step. ValueError if there is none."""
        found = self.checkpoints.last_intact()
        if found is None:
            raise ValueError(f"nothing to resume: {self.checkpoints.folder} holds no checkpoint")
        progress = self.checkpoints.load(found, self.model, self.optimizer, self.pipeline.reducer)
        self.pipeline.load_state_dict(progress["pipeline"])
        self.data.load_state_dict(progress["data"])
        step, ranks = int(progress["step"]), self.model.transport.world
        note = f"resumed after step {step:,}, from {found.path}"
        if (saved := found.state["ranks"]) != ranks:
            note += (
                f"; it was saved on {_count_ranks(saved)} and continues on {_count_ranks(ranks)}: "
                "the speed changes, results change by rounding alone"
            )
        self.notes.append(note)
        return step


def _count_ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
