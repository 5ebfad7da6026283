"""The buckets in which the draws of an id are counted.

Imports no torch: neither do the processes that compile kernels.
"""

from __future__ import annotations

ROWS = 2  # of buckets in a shard; an id is in one bucket of each
SHARD = 52  # bits of a key below its shard
HALF = 26  # bits that choose a bucket
