"""FreeScale: distributed training of sequence recommendation models with minimal scaling cost."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"  # the only place; pyproject.toml reads it

# Names load on first use: `freescale --help` must not wait for torch.
_EXPORTS = {
    "DataConfig": "freescale.config",
    "ModelConfig": "freescale.config",
    "RunConfig": "freescale.config",
    "TrainConfig": "freescale.config",
    "Jagged": "freescale.batch",
    "Nested": "freescale.batch",
    "SequenceBatch": "freescale.batch",
    "SGD": "freescale.embedding.optimizers",
    "Adagrad": "freescale.embedding.optimizers",
    "Adam": "freescale.embedding.optimizers",
    "RowWiseAdagrad": "freescale.embedding.optimizers",
    "ShardedModel": "freescale.embedding.parallelize",
    "parallelize": "freescale.embedding.parallelize",
    "ThresholdedExchange": "freescale.compress.activations",
    "Thresholding": "freescale.pipeline.dense.thresholded",
    "Pipeline": "freescale.pipeline.pipeline",
    "Callback": "freescale.train.callbacks",
    "ConsoleProgress": "freescale.train.progress",
    "Trainer": "freescale.train.trainer",
    "connect": "freescale.transport.connect",
    "data": "freescale.data",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Callback",
    "ConsoleProgress",
    "DataConfig",
    "Jagged",
    "ModelConfig",
    "Nested",
    "Pipeline",
    "RowWiseAdagrad",
    "RunConfig",
    "SequenceBatch",
    "ShardedModel",
    "ThresholdedExchange",
    "Thresholding",
    "TrainConfig",
    "Trainer",
    "connect",
    "data",
    "parallelize",
]

if TYPE_CHECKING:
    from freescale import data
    from freescale.batch import Jagged, Nested, SequenceBatch
    from freescale.compress.activations import ThresholdedExchange
    from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
    from freescale.embedding.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
    from freescale.embedding.parallelize import ShardedModel, parallelize
    from freescale.pipeline.dense.thresholded import Thresholding
    from freescale.pipeline.pipeline import Pipeline
    from freescale.train.callbacks import Callback
    from freescale.train.progress import ConsoleProgress
    from freescale.train.trainer import Trainer
    from freescale.transport.connect import connect


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'freescale' has no attribute {name!r}")
    module = import_module(_EXPORTS[name])
    return module if name == "data" else getattr(module, name)
