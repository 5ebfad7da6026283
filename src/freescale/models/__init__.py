"""Sequence recommenders as plain modules: nothing here knows that it may be distributed."""

from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU

__all__ = ["HSTU", "Ranking", "Retrieval"]
