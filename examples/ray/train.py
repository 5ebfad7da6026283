"""freescale.Trainer under Ray Train:

    python examples/ray/train.py --data histories.parquet --folder /shared/runs/first

Ray starts the ranks, reports metrics, and starts them again after a failure; the run continues from
its own last checkpoint.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import freescale
from freescale import Callback, Metrics, RunView


class ReportToRay(Callback):
    """Reports evaluations and checkpoints. All ranks report: Ray waits for each of them."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def on_log(self, trainer: RunView, entry: Mapping[str, Any]) -> None:
        self._metrics |= {"loss": entry["loss"], "step": entry["step"]}

    def on_evaluation(self, trainer: RunView, metrics: Metrics, part: str) -> None:
        self._metrics |= {f"{part}/{name}": value for name, value in metrics["model"].items()}
        ray.train.report(self._metrics | {"step": trainer.step})

    def on_checkpoint(self, trainer: RunView, path: Path) -> None:
        # one rank hands the folder to Ray, which copies it to its own storage
        own = Checkpoint.from_directory(path) if trainer.rank == 0 else None
        ray.train.report(self._metrics | {"step": trainer.step}, checkpoint=own)


def train(settings: dict[str, Any]) -> None:
    """On every rank."""
    config = freescale.RunConfig.from_settings(settings["options"])
    freescale.Trainer(config, settings["folder"], resume="auto", callbacks=[ReportToRay()]).train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--folder", required=True, help="of the run, on storage of all nodes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument("--failures", type=int, default=3, help="lost ranks that Ray starts again")
    parser.add_argument("--options", default="{}", help="of training, as '{\"epochs\": 3}'")
    given = parser.parse_args()
    options = {**json.loads(given.options), "data": given.data}
    result = TorchTrainer(
        train,
        train_loop_config={"options": options, "folder": given.folder},
        scaling_config=ScalingConfig(num_workers=given.ranks, use_gpu=given.gpus),
        run_config=RunConfig(
            name=Path(given.folder).name,
            storage_path=str(Path(given.folder).resolve().parent / "ray"),
            failure_config=FailureConfig(max_failures=given.failures),
        ),
    ).fit()
    print(result.metrics)


if __name__ == "__main__":
    main()
