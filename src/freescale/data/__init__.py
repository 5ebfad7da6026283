"""Data: interaction files, the histories file made of them, and each rank's slices of global
batches; and synthetic histories."""

from __future__ import annotations

from freescale.data.hashed_ids import hash_ids
from freescale.data.interactions import read_interactions
from freescale.data.loader import Histories
from freescale.data.prefetch import prefetch
from freescale.data.prepare import prepare
from freescale.data.synthetic import SyntheticReport, generate

__all__ = [
    "Histories",
    "SyntheticReport",
    "generate",
    "hash_ids",
    "prefetch",
    "prepare",
    "read_interactions",
]
