"""The state of a run in its checkpoints: model, optimizer, pipeline and position in the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from freescale.data.loader import Histories
from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.pipeline import Pipeline
from freescale.train.best import Best
from freescale.train.checkpoint import Checkpoints


@dataclass
class RunState:
    """What a run needs to go on. `save` and `load` are collectives."""

    checkpoints: Checkpoints
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    pipeline: Pipeline
    data: Histories
    best: Best | None = None
    notes: list[str] = field(default_factory=list, init=False)  # about what was loaded
    skipped: list[int] = field(default_factory=list, init=False)  # batches that are left out
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
        progress: dict[str, Any] = {
            "step": self.pipeline.steps,
            "pipeline": self.pipeline.state_dict(),
            "data": self.data.state_dict(number + 1),
        }
        if self.skipped:
            progress["skipped"] = self.skipped
        protected: list[int] = []
        if self.best is not None:
            progress["best"] = self.best.state_dict()
            protected += [self.best.step] if self.best.kept and self.best.step else []
        path = self.checkpoints.save(
            self.model, self.optimizer, progress, self.pipeline.reducer, protected
        )
        self._saved = self.pipeline.steps
        return path

    def load(self, name: str = "last") -> int:
        """Loads a checkpoint, as `Checkpoints.find` names it, and returns its step. ValueError if
        there is none."""
        found = self.checkpoints.find(name)
        progress = self.checkpoints.load(found, self.model, self.optimizer, self.pipeline.reducer)
        self.pipeline.load_state_dict(progress["pipeline"])
        self.data.load_state_dict(progress["data"])
        self.skipped, self._saved = list(progress.get("skipped", ())), 0
        if self.best is not None:
            self.best.load_state_dict(progress.get("best"))
        step, ranks = int(progress["step"]), self.model.transport.world
        note = f"resumed after step {step:,}, from {found.path}"
        if (saved := found.state["ranks"]) != ranks:
            note += (
                f"; it was saved on {_count_ranks(saved)} and continues on {_count_ranks(ranks)}: "
                "the speed changes, results change by rounding alone"
            )
        self.notes.append(note)
        return step

    def roll_back(self, number: int) -> int:
        """Loads the last checkpoint, and leaves out the batch `number` from then on. Returns the
        step."""
        step = self.load()
        self.skipped.append(number)
        return step


def _count_ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
