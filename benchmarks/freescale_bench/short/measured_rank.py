"""One rank of a training run that reads its processor time at its steps, and evaluates the
validation part where a run evaluates the test part.

Stands alone: `bench.py` runs it with FreeScale as it is and as it was at an earlier commit, with
the settings of the run and the files for its figures as one argument in JSON.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from freescale.config import RunConfig
from freescale.train.callbacks import Callback
from freescale.train.trainer import Trainer

_TICKS = os.sysconf("SC_CLK_TCK")


def read_processor_time() -> float:
    """Seconds of this process with all its threads, and of the workers that it has started."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    workers = Path("/proc/self/task").glob("*/children")
    ids = [number for each in workers for number in each.read_text().split()]
    return used.ru_utime + used.ru_stime + sum(_read_ticks(number) for number in ids) / _TICKS


def _read_ticks(process: str) -> int:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # it has ended
        return 0
    fields = text.rpartition(")")[2].split()  # from the third on: a name may have spaces
    return int(fields[11]) + int(fields[12])


class Marks(Callback):
    """Times and processor times of the steps after the first `warm_up`."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._times: list[float] = []
        self._used = (0.0, 0.0)  # at the first mark, and at the last
        self.quality: dict[str, float] = {}

    def on_step(self, trainer: Trainer, step: Any) -> None:
        if trainer.step < self._warm_up:
            return
        self._times.append(time.perf_counter())
        if trainer.step in (self._warm_up, trainer.total):
            self._used = self._used[1], read_processor_time()

    def on_evaluation(self, trainer: Trainer, metrics: Any, part: str) -> None:
        self.quality = dict(metrics["model"])

    def summarise(self) -> dict[str, float]:
        steps = [
            after - before for before, after in zip(self._times, self._times[1:], strict=False)
        ]
        used = self._used[1] - self._used[0]
        return {
            "step_ms": 1e3 * statistics.median(steps),
            "cpu_ms": 1e3 * used / len(steps),
            **self.quality,
        }


class Measured(Trainer):
    """Has both names under which the method has been called, for either commit."""

    def evaluate(self, part: str) -> dict[str, dict[str, float]]:
        return super().evaluate("validation")

    def _evaluate(self, part: str) -> Any:
        return super()._evaluate("validation")  # type: ignore[misc]


def main(argument: str) -> None:
    """argument: {"settings": ..., "folder": ..., "warm_up": ..., "figures": of each rank}."""
    given = json.loads(argument)
    marks = Marks(given["warm_up"])
    config = RunConfig.from_settings(given["settings"])
    trainer = Measured(config, given["folder"], callbacks=[marks])
    rank = trainer.rank
    trainer.train()
    Path(given["figures"][rank]).write_text(json.dumps(marks.summarise()))


if __name__ == "__main__":
    main(sys.argv[1])
