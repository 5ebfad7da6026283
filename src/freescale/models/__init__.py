"""Sequence recommenders as plain modules: nothing here knows that it may be distributed."""

from freescale.models.dlrm import DlrmHSTU, DlrmRanking
from freescale.models.encoder import Encoder
from freescale.models.features import (
    FeatureTables,
    ItemTower,
    add_features,
    embed_features,
    sum_features,
)
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.models.incremental import (
    HistoryState,
    append_events,
    encode_states,
    start_histories,
)
from freescale.models.sasrec import SASRec

__all__ = [
    "HSTU",
    "DlrmHSTU",
    "DlrmRanking",
    "Encoder",
    "FeatureTables",
    "HistoryState",
    "ItemTower",
    "Ranking",
    "Retrieval",
    "SASRec",
    "add_features",
    "append_events",
    "embed_features",
    "encode_states",
    "start_histories",
    "sum_features",
]
