"""FreeScale: distributed training of sequence recommendation models with minimal scaling cost.

Everything that programs use is here; submodules are internal and may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"  # the only place; pyproject.toml reads it

# Names load on first use: `freescale --help` must not wait for torch.
_EXPORTS = {
    "freescale.balance.balancer": "Balancer",
    "freescale.balance.cost": "CostModel",
    "freescale.balance.problem": "Problem",
    "freescale.batch": "Jagged Nested SequenceBatch",
    "freescale.config": "DataConfig ModelConfig RunConfig TrainConfig",
    "freescale.data.flat.schema": "Schema",
    "freescale.embedding.optimizers": "Adagrad Adam CountedAdam RowWiseAdagrad SGD",
    "freescale.embedding.dynamic_rules": "After LFU Dynamic Seen",
    "freescale.embedding.parallelize": "parallelize",
    "freescale.embedding.sharded_model": "ShardedModel",
    "freescale.embedding.host_tables.tiers": "Disk Host",
    "freescale.ledger.ledger": "Ledger",
    "freescale.pipeline.independence": "check_samples_independent",
    "freescale.pipeline.loss_watch": "LossNotFinite",
    "freescale.pipeline.pipeline": "Pipeline",
    "freescale.pipeline.step_result": "StepResult",
    "freescale.recommend.recommender": "Recommendations Recommender load",
    "freescale.recommend.subscriber": "Subscriber",
    "freescale.train.callbacks": "Callback Metrics RunView",
    "freescale.train.state.checkpoints": "Checkpoints",
    "freescale.train.evaluate": "evaluate",
    "freescale.train.export": "export",
    "freescale.train.progress": "ConsoleProgress",
    "freescale.train.trackers": "MLflowLog WandbLog",
    "freescale.train.trainer": "Trainer",
    "freescale.transport.api": "Transport TransportError",
    "freescale.transport.connect": "connect",
    "freescale.transport.failures": "RemoteError",
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names.split()}
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
    "MLflowLog",
    "Metrics",
    "ModelConfig",
    "Nested",
    "Pipeline",
    "Problem",
    "Recommendations",
    "Recommender",
    "RemoteError",
    "RowWiseAdagrad",
    "RunConfig",
    "RunView",
    "Schema",
    "Seen",
    "SequenceBatch",
    "ShardedModel",
    "StepResult",
    "Subscriber",
    "TrainConfig",
    "Trainer",
    "Transport",
    "TransportError",
    "WandbLog",
    "check_samples_independent",
    "connect",
    "data",
    "evaluate",
    "export",
    "load",
    "models",
    "parallelize",
]

if TYPE_CHECKING:
    from freescale import data, models
    from freescale.balance.balancer import Balancer
    from freescale.balance.cost import CostModel
    from freescale.balance.problem import Problem
    from freescale.batch import Jagged, Nested, SequenceBatch
    from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
    from freescale.data.flat.schema import Schema
    from freescale.embedding.dynamic_rules import LFU, After, Dynamic, Seen
    from freescale.embedding.host_tables.tiers import Disk, Host
    from freescale.embedding.optimizers import SGD, Adagrad, Adam, CountedAdam, RowWiseAdagrad
    from freescale.embedding.parallelize import parallelize
    from freescale.embedding.sharded_model import ShardedModel
    from freescale.ledger.ledger import Ledger
    from freescale.pipeline.independence import check_samples_independent
    from freescale.pipeline.loss_watch import LossNotFinite
    from freescale.pipeline.pipeline import Pipeline
    from freescale.pipeline.step_result import StepResult
    from freescale.recommend.recommender import Recommendations, Recommender, load
    from freescale.recommend.subscriber import Subscriber
    from freescale.train.callbacks import Callback, Metrics, RunView
    from freescale.train.evaluate import evaluate
    from freescale.train.export import export
    from freescale.train.progress import ConsoleProgress
    from freescale.train.state.checkpoints import Checkpoints
    from freescale.train.trackers import MLflowLog, WandbLog
    from freescale.train.trainer import Trainer
    from freescale.transport.api import Transport, TransportError
    from freescale.transport.connect import connect
    from freescale.transport.failures import RemoteError


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"freescale.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'freescale' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # the next time without a search
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
