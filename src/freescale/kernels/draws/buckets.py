"""Which buckets the draws of an id are counted in. Without torch, which processes that compile
kernels do not import."""

from __future__ import annotations

ROWS = 2  # of buckets in a shard; an id is in one bucket of each
SHARD = 52  # bits of a key below its shard
HALF = 26  # bits that choose a bucket
