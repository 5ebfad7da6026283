"""Models written for TorchRec, trained here as they are: EmbeddingCollection and
EmbeddingBagCollection read sharded tables, batches are made of KeyedJaggedTensors. Needs TorchRec;
nothing else of FreeScale does."""

from __future__ import annotations

try:
    import torchrec as _torchrec  # noqa: F401
except ImportError as error:
    raise ImportError(
        "freescale.torchrec needs TorchRec in the version of your PyTorch: "
        "pip install 'freescale[torchrec]'; for CPUs see docs/start/from_torchrec.md"
    ) from error

from freescale.torchrec.checkpoint import load_checkpoint, save_checkpoint
from freescale.torchrec.parallelize import parallelize
from freescale.torchrec.pipeline import Pipeline
from freescale.torchrec.sharded_model import ShardedModel, check_samples_independent

__all__ = [
    "Pipeline",
    "ShardedModel",
    "check_samples_independent",
    "load_checkpoint",
    "parallelize",
    "save_checkpoint",
]
