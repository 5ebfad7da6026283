"""The columns of events that a model reads, and its inputs made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from freescale.batch import Jagged, SequenceBatch
from freescale.models.features import ItemVectors
from freescale.models.heads import Retrieval


def list_columns(model: Retrieval) -> list[str]:
    """The columns of events that the model reads."""
    found = {
        "history": True,
        "timestamps": model.encoder.has_time_bias,
        "actions": model.action is not None,
        "event_features": model.event_features is not None,
        "history_features": model.item_features is not None,
        "history_own": model.item_features is not None,
        "history_vectors": len(model.item_vectors) > 0,
    }
    return [name for name, read in found.items() if read]


def embed_events(model: Retrieval, columns: dict[str, Tensor], counts: list[int]) -> Tensor:
    """[events, width]"""
    lengths = torch.tensor(counts)  # on the host: nobody reads them on the device
    batch = SequenceBatch({name: Jagged(values, lengths) for name, values in columns.items()})
    items, history = None, batch.sequences["history"]
    if model.item_features is not None:  # these events alone, not the whole table
        described = (columns.get(f"history_{name}") for name in ("features", "own", "vectors"))
        rows = model.describe_rows(model.item(history.values), *described)
        items = ItemVectors(rows, {"history": torch.arange(len(rows), device=rows.device)})
    return model._embed_events(batch, history, items)
