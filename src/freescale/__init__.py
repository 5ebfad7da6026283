"""FreeScale: distributed training of sequence recommendation models with minimal scaling cost.

Everything that programs use is here; submodules are internal and may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"  # the only place; pyproject.toml reads it

# Names load on first use: `freescale --help` must not wait for torch.
_EXPORTS = {
    "Balancer": "freescale.balance.balancer",
    "CostModel": "freescale.balance.cost",
    "Problem": "freescale.balance.problem",
    "Jagged": "freescale.batch",
    "Nested": "freescale.batch",
    "SequenceBatch": "freescale.batch",
    "ThresholdedExchange": "freescale.compress.activations",
    "DataConfig": "freescale.config",
    "ModelConfig": "freescale.config",
    "RunConfig": "freescale.config",
    "TrainConfig": "freescale.config",
    "Adagrad": "freescale.embedding.optimizers",
    "Adam": "freescale.embedding.optimizers",
    "CountedAdam": "freescale.embedding.optimizers",
    "RowWiseAdagrad": "freescale.embedding.optimizers",
    "SGD": "freescale.embedding.optimizers",
    "After": "freescale.embedding.dynamic_rules",
    "LFU": "freescale.embedding.dynamic_rules",
    "Dynamic": "freescale.embedding.dynamic_rules",
    "Seen": "freescale.embedding.dynamic_rules",
    "parallelize": "freescale.embedding.parallelize",
    "ShardedModel": "freescale.embedding.sharded_model",
    "Disk": "freescale.embedding.host_tables.tiers",
    "Host": "freescale.embedding.host_tables.tiers",
    "Ledger": "freescale.ledger.ledger",
    "Thresholding": "freescale.pipeline.dense.thresholded",
    "check_samples_independent": "freescale.pipeline.independence",
    "LossNotFinite": "freescale.pipeline.loss_watch",
    "Pipeline": "freescale.pipeline.pipeline",
    "StepResult": "freescale.pipeline.step_result",
    "Callback": "freescale.train.callbacks",
    "Checkpoints": "freescale.train.checkpoint.checkpoints",
    "evaluate": "freescale.train.evaluate",
    "export": "freescale.train.export",
    "ConsoleProgress": "freescale.train.progress",
    "Trainer": "freescale.train.trainer",
    "Transport": "freescale.transport.api",
    "TransportError": "freescale.transport.api",
    "connect": "freescale.transport.connect",
    "RemoteError": "freescale.transport.failures",
}
_SUBPACKAGES = ("data", "models", "torchrec")  # the last one needs TorchRec

__all__ = [
    "LFU",
    "SGD",
    "Adagrad",
    "Adam",
    "After",
    "Balancer",
    "Callback",
    "Checkpoints",
    "ConsoleProgress",
    "CostModel",
    "CountedAdam",
    "DataConfig",
    "Disk",
    "Dynamic",
    "Host",
    "Jagged",
    "Ledger",
    "LossNotFinite",
    "ModelConfig",
    "Nested",
    "Pipeline",
    "Problem",
    "RemoteError",
    "RowWiseAdagrad",
    "RunConfig",
    "Seen",
    "SequenceBatch",
    "ShardedModel",
    "StepResult",
    "ThresholdedExchange",
    "Thresholding",
    "TrainConfig",
    "Trainer",
    "Transport",
    "TransportError",
    "check_samples_independent",
    "connect",
    "data",
    "evaluate",
    "export",
    "models",
    "parallelize",
]

if TYPE_CHECKING:
    from freescale import data, models
    from freescale.balance.balancer import Balancer
    from freescale.balance.cost import CostModel
    from freescale.balance.problem import Problem
    from freescale.batch import Jagged, Nested, SequenceBatch
    from freescale.compress.activations import ThresholdedExchange
    from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
    from freescale.embedding.dynamic_rules import LFU, After, Dynamic, Seen
    from freescale.embedding.host_tables.tiers import Disk, Host
    from freescale.embedding.optimizers import SGD, Adagrad, Adam, CountedAdam, RowWiseAdagrad
    from freescale.embedding.parallelize import parallelize
    from freescale.embedding.sharded_model import ShardedModel
    from freescale.ledger.ledger import Ledger
    from freescale.pipeline.dense.thresholded import Thresholding
    from freescale.pipeline.independence import check_samples_independent
    from freescale.pipeline.loss_watch import LossNotFinite
    from freescale.pipeline.pipeline import Pipeline
    from freescale.pipeline.step_result import StepResult
    from freescale.train.callbacks import Callback
    from freescale.train.checkpoint.checkpoints import Checkpoints
    from freescale.train.evaluate import evaluate
    from freescale.train.export import export
    from freescale.train.progress import ConsoleProgress
    from freescale.train.trainer import Trainer
    from freescale.transport.api import Transport, TransportError
    from freescale.transport.connect import connect
    from freescale.transport.failures import RemoteError


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"freescale.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'freescale' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value  # the next time without a search
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
