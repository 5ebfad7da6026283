"""The best evaluation of a run: it decides which checkpoint stays and when training ends early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from freescale.config import RunConfig
from freescale.config.metrics import choose_metric, is_better


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
