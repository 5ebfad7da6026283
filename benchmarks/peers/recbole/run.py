"""Trains RecBole's SASRec with its default settings and prints what came of it, as JSON.

Stands alone: `freescale bench quality --recbole` runs it with the interpreter of .venv-recbole,
which has no FreeScale. RecBole 1.2.1 is written for older versions of numpy, torch and ray,
whose names it is given.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
import types
import warnings
from typing import Any

import numpy as np
import torch


def give_old_names() -> None:
    old = {"float": float, "int": int, "bool": bool, "object": object}
    old |= {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}
    for name, kind in old.items():
        if name not in np.__dict__:
            setattr(np, name, kind)
    load = torch.load
    torch.load = lambda *words, **options: load(*words, **{**options, "weights_only": False})
    ray = types.ModuleType("ray")
    ray.tune = types.ModuleType("ray.tune")  # type: ignore[attr-defined]
    sys.modules |= {"ray": ray, "ray.tune": ray.tune}


def read_processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def train(folder: str, name: str, epochs: int, seed: int) -> dict[str, Any]:
    """Trains on FOLDER/NAME/NAME.inter.

    Returns:
        Seconds and processor seconds of training, with its evaluation of the validation part after
        each epoch; and the metrics of the test part, with the weights that were best on validation.
    """
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    with tempfile.TemporaryDirectory() as checkpoints:
        settings = {
            "data_path": folder,
            "epochs": epochs,
            "seed": seed,
            "train_neg_sample_args": None,  # which the default loss, of all items, demands
            "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
            "checkpoint_dir": checkpoints,
            "show_progress": False,
            "state": "ERROR",
            "use_gpu": False,
        }
        # Config reads the command line, too.
        sys.argv = sys.argv[:1]
        config = Config(model="SASRec", dataset=name, config_dict=settings)
        init_seed(config["seed"], True)
        parts = data_preparation(config, create_dataset(config))
        model = get_model("SASRec")(config, parts[0].dataset).to(config["device"])
        trainer = get_trainer(config["MODEL_TYPE"], "SASRec")(config, model)
        begin, processor = time.perf_counter(), read_processor_time()
        trainer.fit(parts[0], parts[1], saved=True, show_progress=False)
        seconds = time.perf_counter() - begin
        processor = read_processor_time() - processor
        found = trainer.evaluate(parts[2], load_best_model=True, show_progress=False)
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "epochs": len(trainer.train_loss_dict),
        "threads": torch.get_num_threads(),
        "test": {key: float(value) for key, value in found.items()},
        "versions": {"torch": torch.__version__, "recbole": "1.2.1"},
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    give_old_names()
    folder, name, epochs, seed = sys.argv[1:]
    print(json.dumps(train(folder, name, int(epochs), int(seed))))
