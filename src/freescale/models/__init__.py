"""Sequence recommenders as plain modules: nothing here knows that it may be distributed."""

from freescale.models.encoder import Encoder
from freescale.models.features import (
    FeatureTables,
    add_features,
    embed_features,
    sum_features,
)
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.models.item_tower import ItemTower
from freescale.models.sasrec import SASRec
from freescale.models.segments import Memory, SegmentedHSTU, split_history

__all__ = [
    "HSTU",
    "Encoder",
    "FeatureTables",
    "ItemTower",
    "Memory",
    "Ranking",
    "Retrieval",
    "SASRec",
    "SegmentedHSTU",
    "add_features",
    "embed_features",
    "split_history",
    "sum_features",
]
