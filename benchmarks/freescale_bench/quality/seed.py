"""One seed of a recipe, in its own process: trains or resumes, and ranks every user's target.

Usage: `python -m freescale_bench.quality.seed TASK.json`, with the fields of `Seed`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freescale.config import RunConfig
from freescale_bench.common.jobs import Job

RESULT, RANKS, TRAINED = "quality.json", "ranks.csv", "trained"
ELSEWHERE = (
    "data",
    "cache",
    "workers",
)  # settings for paths and workers, which do not affect the result


@dataclass(frozen=True)
class Seed:
    """A run: settings as for `RunConfig.from_settings`, and its folder."""

    settings: dict[str, Any]
    folder: str

    @property
    def config(self) -> RunConfig:
        return RunConfig.from_settings(self.settings)

    def describe(self) -> dict[str, Any]:
        """Returns the settings that decide the result."""
        described: dict[str, Any] = json.loads(self.config.to_json())
        for name in ELSEWHERE:
            del described["data"][name]
        return described

    def _describe_again(self, described: dict[str, Any]) -> dict[str, Any]:
        """Adds defaults for settings that did not exist when `describe` was called."""
        data = asdict(self.config.data)
        raw = described | {"data": described["data"] | {name: data[name] for name in ELSEWHERE}}
        filled: dict[str, Any] = json.loads(RunConfig.from_json(json.dumps(raw)).to_json())
        return {**filled, "data": {n: v for n, v in filled["data"].items() if n not in ELSEWHERE}}

    def find_result(self) -> dict[str, Any] | None:
        """Returns the result of the run, if finished.

        Raises:
            ValueError: the folder has a run with other settings.
        """
        path = Path(self.folder) / RESULT
        if not path.exists():
            return None
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if self._describe_again(result["config"]) != self.describe():
            raise ValueError(
                f"{self.folder} has a run with other settings: name another --run-folder, or "
                "remove it"
            )
        return result

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def list_jobs(arm: str, seeds: Sequence[Seed]) -> list[Job]:
    """Lists the jobs that train the seeds of an arm that have no result yet."""
    jobs = []
    for number, seed in enumerate(seeds):
        if seed.find_result() is None:
            folder = Path(seed.folder)
            folder.mkdir(parents=True, exist_ok=True)
            seed.write(folder / "task.json")
            command = [sys.executable, "-m", "freescale_bench.quality.seed"]
            command += [str(folder / "task.json")]
            jobs.append(Job(f"{arm}, seed {number}", command, folder / "log.txt"))
    return jobs


def train_seed(seed: Seed) -> None:
    """Trains to the end and writes quality.json and ranks.csv into the folder."""
    from freescale.train.build import prepare_data
    from freescale.train.commands import evaluate_checkpoint
    from freescale.train.sample_ranks import SampleRanks, write_ranks
    from freescale.train.state.checkpoints import Checkpoints
    from freescale.train.trainer import Trainer
    from freescale.transport.connect import connect

    config, folder = seed.config, Path(seed.folder)
    path = prepare_data(config)
    train = config.train
    transport = connect(train.device, train.timeout, train.transport)
    begin, trained = time.perf_counter(), folder / TRAINED
    resumed = Checkpoints(folder / "checkpoints", transport).latest() is not None
    if not trained.exists():
        trainer = Trainer(config, folder, resume=resumed, histories=path, transport=transport)
        if trainer.step < trainer.total:
            trainer.train()
        trained.touch()
    seconds = time.perf_counter() - begin
    ranks = SampleRanks()
    _, progress, quality = evaluate_checkpoint(config, folder, "test", path, transport, keep=ranks)
    write_ranks(folder / RANKS, path, ranks)  # with the user ids that the peer is trained on
    _, _, validation = evaluate_checkpoint(config, folder, "validation", path, transport)
    result = {
        "config": seed.describe(),
        "quality": quality,
        "validation": validation["model"],  # to choose settings by
        "step": progress["step"],
        "seconds": None if resumed else round(seconds, 1),
        "device": transport.device.type,
    }
    temporary = folder / f"{RESULT}.tmp"
    temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    temporary.replace(folder / RESULT)
    transport.close()


if __name__ == "__main__":
    train_seed(Seed(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
