"""Where a run stands in its data: applied batches and remaining steps. The same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from freescale.config import TrainConfig
from freescale.data.batches.loader import Histories
from freescale.pipeline.pipeline import Pipeline
from freescale.train.best import Best


def count_steps(data: Histories, limit: int | None, skipped: Sequence[int] = ()) -> int:
    """Steps of a whole run that skips some batches and ends after `limit` steps."""
    count = data.stop - len(skipped)
    return min(count, limit or count)


@dataclass
class Position:
    """The position of a run: `number` and `skipped` change, the rest follows from them."""

    settings: TrainConfig
    pipeline: Pipeline
    data: Histories
    best: Best | None = None  # evaluation so far, if evaluations are compared
    number: int = -1  # the last batch that was applied
    skipped: list[int] = field(default_factory=list)  # batches

    @property
    def step(self) -> int:
        """Steps made so far, those of a resumed run included."""
        return self.pipeline.steps

    @property
    def total(self) -> int:
        """Steps that the run ends with."""
        return count_steps(self.data, self.settings.steps, self.skipped)

    @property
    def following(self) -> int:
        """The next batch to apply."""
        number = self.number + 1
        while number in self.skipped:
            number += 1
        return number

    @property
    def epoch(self) -> int:
        """Complete passes over the data."""
        return self.data.find_epoch(self.following)

    @property
    def ends_epoch(self) -> bool:
        """Whether the last applied batch is the last of its epoch."""
        return self.epoch > self.data.find_epoch(self.number)

    @property
    def next_window(self) -> int:
        """In order of time, the window after the one of the last applied batch."""
        time, place = self.data.time, self.data.find_epoch(self.number) + 1
        assert time is not None
        return self.data.windows[place] if place < len(self.data.windows) else time.windows.stop

    @property
    def is_before_test(self) -> bool:
        """Whether all windows are trained, so that the next one is that of the test part."""
        return self.epoch >= len(self.data.windows)

    @property
    def is_complete(self) -> bool:
        """Whether no step is left to make."""
        if self.data.time is not None and self.data.time.follows:  # more may come
            return self.settings.steps is not None and self.step >= self.settings.steps
        return self.step >= self.total or (self.best is not None and self.best.exhausted)

    @property
    def ends_window(self) -> bool:
        """Whether no batch is left of the window of a stream."""
        return self.following >= self.data.stop

    def refuse_end(self, folder: Path) -> None:
        """Raises ValueError if nothing is left to train, and names the setting that changes it."""
        if self.is_complete and (self.best is None or not self.best.exhausted):
            raise ValueError(self._explain_end(folder))
        if self.best is not None and self.best.exhausted:
            raise ValueError(
                f"{folder} ended at step {self.step}, after {self.best.since} evaluations "
                "without a better one: pass a larger --patience to continue"
            )

    def _explain_end(self, folder: Path) -> str:
        limit, epochs = self.settings.steps, self.settings.epochs
        made = f"nothing is left to train: {folder} has made {self.step:,} steps"
        if limit is not None and limit <= self.data.stop:
            return f"{made}, and --steps is {limit:,}: pass a larger --steps to continue"
        if self.data.time is not None:
            return f"{made}, and the windows before the test window have no more: give newer data"
        larger = f" (--steps {limit:,} alone does not)" if limit else ""
        return (
            f"{made}, and --epochs {epochs} ends after {self.data.stop:,}: "
            f"pass a larger --epochs to continue{larger}"
        )
