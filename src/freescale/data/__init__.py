"""Data: interaction files, the histories file made of them, and each rank's slices of global
batches; flat tables; and synthetic histories."""

from __future__ import annotations

from freescale.data.batches.loader import Histories
from freescale.data.batches.specs import NegativeSpec, ReadSpec, SampleSpec, SplitSpec
from freescale.data.batches.time_order import TimeSpec
from freescale.data.batches.workers import prefetch
from freescale.data.flat.table import FlatTable
from freescale.data.ingest.hashed_ids import hash_ids
from freescale.data.ingest.interactions import read_interactions
from freescale.data.ingest.prepare import prepare
from freescale.data.store.build import append_to_store, build_store
from freescale.data.store.event_store import EventStore
from freescale.data.synthetic.generate import SyntheticReport, generate

__all__ = [
    "EventStore",
    "FlatTable",
    "Histories",
    "NegativeSpec",
    "ReadSpec",
    "SampleSpec",
    "SplitSpec",
    "SyntheticReport",
    "TimeSpec",
    "append_to_store",
    "build_store",
    "generate",
    "hash_ids",
    "prefetch",
    "prepare",
    "read_interactions",
]
