"""The state of a run in its checkpoints: model, optimizer, pipeline and position in the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from freescale.config.origin import Origin
from freescale.embedding.sharded_model import ShardedModel
from freescale.stores.runs import find_checkpoints
from freescale.train.follow import Follower
from freescale.train.position import Position
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.contents import Contents
from freescale.train.state.intact import Intact, find_best_step, verify_checkpoint
from freescale.train.state.restore import load_checkpoint
from freescale.train.state.stored import open_folder


@dataclass
class RunState:
    """Everything a run needs to continue. `save` and `load` are collectives."""

    checkpoints: Checkpoints
    model: ShardedModel
    optimizer: torch.optim.Optimizer
    position: Position
    follower: Follower | None = None  # windows of a run that follows a source
    notes: list[str] = field(default_factory=list, init=False)  # about what was loaded
    _saved: int = field(default=0, init=False)  # the last step in a checkpoint

    def save(self) -> Path | None:
        """Saves the current step, unless it is saved already.

        Returns:
            The folder of a new checkpoint.

        Raises:
            NotFinite: if the model has diverged; nothing is saved then.
        """
        position = self.position
        if self._saved == position.step:
            return None
        protected: list[int] = []
        if (best := position.best) is not None:
            protected += [best.step] if best.kept and best.step else []
        path = self.checkpoints.save(self.model, self.optimizer, self.describe(), protected)
        self._saved = position.step
        return path

    def describe(self) -> dict[str, Any]:
        """Where the run stands, as plain JSON. The data continues after the last applied batch;
        prefetching may have read further."""
        position = self.position
        progress: dict[str, Any] = {
            "step": position.step,
            "pipeline": position.pipeline.state_dict(),
            "data": position.data.state_dict(position.number + 1),
        }
        if position.data.last_time is not None:
            progress["trained_until"] = position.data.last_time
        if self.follower is not None:
            progress["stream"] = self.follower.describe(position.data)
        if position.skipped:
            progress["skipped"] = position.skipped
        if position.best is not None:
            progress["best"] = position.best.state_dict()
        return progress

    def collect(self, contents: Contents) -> None:
        """Collects the current step for a snapshot, with the checkpoint that its marks are
        since."""
        contents.collect(self.model, self.optimizer, self.describe())
        contents.state["checkpoint"] = self.checkpoints.describe_parent()

    def load(self, name: str | Intact = "last") -> int:
        """Loads a checkpoint, by name or as `Checkpoints.find` returns it, and returns its step.
        Later ones stay until the run continues. ValueError if there is none."""
        found = self.checkpoints.find(name) if isinstance(name, str) else name
        progress = self.checkpoints.load(found, self.model, self.optimizer)
        self.go_on_from(progress)
        step, ranks = int(progress["step"]), self.model.transport.world
        note = f"resumed after step {step:,}, from {found.path}"
        if (saved := found.state["ranks"]) != ranks:
            note += (
                f"; it was saved on {_count_ranks(saved)} and continues on {_count_ranks(ranks)}: "
                "the speed changes, results change by rounding alone"
            )
        self.notes.append(note)
        return step

    def begin_from(self, origin: Origin) -> None:
        """Loads the model of the run that this one continues: tables, dense weights and their
        optimizer's state. ValueError if its checkpoint is gone or another one."""
        transport = self.model.transport
        path = open_folder(find_checkpoints(Path(origin.run))).path(origin.step)
        found = verify_checkpoint(path, transport)
        if found.checksum != origin.checksum:
            raise ValueError(f"{path} has changed since this run was begun: begin another one")
        load_checkpoint(found, self.model, self.optimizer, continues=False)
        self.notes.append(origin.describe())

    def go_on_from(self, progress: Mapping[str, Any]) -> None:
        """Moves the run to the position of `describe`."""
        position = self.position
        position.pipeline.load_state_dict(progress["pipeline"])
        if self.follower is not None:
            self.follower.restore(position, progress["stream"])
        position.data.load_state_dict(progress["data"])
        position.number = position.data.start - 1
        position.skipped, self._saved = list(progress.get("skipped", ())), 0
        if self.follower is not None:
            self.follower.again = position.ends_window
        if position.best is not None:
            position.best.load_state_dict(self._find_best(progress))

    def _find_best(self, progress: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The best evaluation so far; None if its checkpoint was kept but is gone, because a later
        one that the run has given up was better."""
        step = find_best_step(progress)
        if step is None or self.checkpoints.holds(step):
            return progress.get("best")
        self.notes.append(f"the best checkpoint, step {step:,}, has gone: looking for another")
        return None


def _count_ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
