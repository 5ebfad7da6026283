"""Where a run stands in its data: applied batches and remaining steps. The same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from freescale.config import RunConfig, TrainConfig
from freescale.config.metrics import choose_metric, is_better
from freescale.data.batches.loader import Histories
from freescale.pipeline.pipeline import Pipeline


@dataclass
class Best:
    """The best evaluation of the validation part so far, and the number of evaluations since.

    Metrics are the same on every rank, so ranks need not agree on it. It is part of every
    checkpoint: a resumed run keeps the same best and stops at the same evaluation.
    """

    metric: str
    kept: bool  # its checkpoint stays
    patience: int | None = None  # evaluations without a better one, after which training ends
    step: int | None = None  # None: no evaluation has a value yet
    value: float | None = None
    since: int = 0  # evaluations after it

    def note(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Notes an evaluation. Returns whether it is the best."""
        value = metrics.get(self.metric, math.nan)
        if not is_better(self.metric, value, self.value):
            self.since += 1
            return False
        self.step, self.value, self.since = step, value, 0
        return True

    @property
    def exhausted(self) -> bool:
        """Whether training ends: the same on every rank after the same step."""
        return self.patience is not None and self.since >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON data. Patience is a setting, which a resumed run may change."""
        return {name: value for name, value in asdict(self).items() if name != "patience"}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continues from a checkpoint's state. Starts over if the checkpoint has none, compared
        another metric, or did not keep the best checkpoint that is now to be kept."""
        if state is None or state["metric"] != self.metric or (self.kept and not state["kept"]):
            return
        self.step, self.value, self.since = state["step"], state["value"], state["since"]


def build_best(config: RunConfig) -> Best | None:
    """Returns None without --keep best and --patience."""
    if config.train.keep != "best" and config.train.patience is None:
        return None
    metric = config.train.keep_metric or choose_metric(config.model.task, config.label_names)
    return Best(metric, config.train.keep == "best", config.train.patience)


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
