"""Refuses the parts of TorchRec without a counterpart here, before any memory is allocated."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from freescale.embedding.parallelize import has_hooks

# By the name of a class or base class: the problem and the fix.
_REFUSED = {
    "ManagedCollisionCollection": "managed collision is not supported: hash ids in the data",
    "ManagedCollisionModule": "managed collision is not supported: hash ids in the data",
    "BaseManagedCollisionEmbeddingCollection": (
        "managed collision is not supported: use the plain collection, and hash ids in the data"
    ),
    "GenericITEPModule": "pruning in training is not supported: use the plain collection",
    "DistributedModelParallel": "it is sharded already: give the model itself",
    "ShardedModule": "it is sharded already: give the model before TorchRec sharded it",
    "FusedEmbeddingBagCollection": (
        "fused collections are not supported: use EmbeddingBagCollection and row_optimizer="
    ),
    "FusedEmbeddingCollection": (
        "fused collections are not supported: use EmbeddingCollection and row_optimizer="
    ),
}
COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


def refuse_unsupported(model: nn.Module) -> None:
    """Raises a ValueError that names the module or table."""
    for path, module in model.named_modules():
        names = [kind.__name__ for kind in type(module).__mro__]
        for name in names:
            if name in _REFUSED:
                _refuse(path, module, _REFUSED[name])
        if type(module).__module__.startswith("torchrec.quant"):
            _refuse(path, module, "quantized collections cannot be trained")
        if isinstance(module, COLLECTIONS):
            if type(module) not in COLLECTIONS:
                kind = next(kind for kind in COLLECTIONS if isinstance(module, kind))
                _refuse(path, module, f"it is derived from {kind.__name__}: use that itself")
            if has_hooks(module):
                _refuse(path, module, "it has hooks, which would be lost: put them on its parent")
            for config in list_configs(module):
                reason = _find_unsupported(config)
                if reason is not None:
                    raise ValueError(f"cannot shard table {config.name!r} of {path!r}: {reason}")


def list_configs(collection: nn.Module) -> list[Any]:
    """The tables of a collection."""
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    assert isinstance(collection, EmbeddingCollection)
    return list(collection.embedding_configs())


def _refuse(path: str, module: nn.Module, reason: str) -> None:
    raise ValueError(f"module {path or 'model'!r} is a {type(module).__name__}: {reason}")


def _find_unsupported(config: Any) -> str | None:
    if getattr(config, "use_virtual_table", False):
        return "virtual tables (use_virtual_table) are not supported: tables have a size"
    if config.num_embeddings_post_pruning is not None:
        return "pruned tables (num_embeddings_post_pruning) are not supported"
    if config.data_type != DataType.FP32:
        return (
            f"data_type {config.data_type.name} is not supported: tables are trained in FP32, and "
            "wire_dtype=torch.bfloat16 halves what travels"
        )
    return None
