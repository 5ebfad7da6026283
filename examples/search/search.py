"""A search for settings with Optuna:

    python examples/search/search.py --data ratings.csv --folder runs/search

Each trial is a run of its own, named trial-NUMBER. Trials that do worse than the median of the
others at the same evaluation end early. Start the same command again, also at the same time on
other machines with the same folder: it continues.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import optuna

import freescale
from freescale import Callback, Metrics, RunView


class Pruning(Callback):
    """Tells Optuna how each evaluation went, and stops a run that does worse than others."""

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        self._trial, self._metric = trial, metric
        self.pruned, self.best = False, float("-inf")

    def on_evaluation(self, trainer: RunView, metrics: Metrics, part: str) -> None:
        if part != "validation":
            return
        value = metrics["model"][self._metric]
        self.best = max(self.best, value)
        self._trial.report(value, trainer.step)
        if self._trial.should_prune():
            self.pruned = True
            trainer.stop()


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    """The settings to search."""
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        "row_lr": trial.suggest_float("row_lr", 1e-4, 1e-1, log=True),
        "width": trial.suggest_categorical("width", [32, 64, 128]),
        "layers": trial.suggest_int("layers", 1, 4),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the runs and the study")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--metric", default="ndcg@10")
    parser.add_argument("--options", default="{}", help="of all runs, as '{\"epochs\": 3}'")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    fixed = {**json.loads(given.options), "data": given.data}

    def objective(trial: optuna.Trial) -> float:
        config = freescale.RunConfig.from_settings({**fixed, **suggest(trial)})
        watch = Pruning(trial, given.metric)
        freescale.Trainer(config, given.folder / f"trial-{trial.number}", callbacks=[watch]).train()
        if watch.pruned:
            raise optuna.TrialPruned
        return watch.best

    study = optuna.create_study(
        study_name="freescale",
        storage=f"sqlite:///{given.folder}/study.db",
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(objective, n_trials=given.trials)
    print(f"best: trial-{study.best_trial.number}, {given.metric} {study.best_value:.4f}")
    print(json.dumps(study.best_params, indent=1))


if __name__ == "__main__":
    main()
