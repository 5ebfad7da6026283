"""Histories that grow, for serving: a new event costs one token."""

from freescale.models.incremental.histories import (
    append_events,
    encode_states,
    start_histories,
)
from freescale.models.incremental.state import HistoryState

__all__ = ["HistoryState", "append_events", "encode_states", "start_histories"]
