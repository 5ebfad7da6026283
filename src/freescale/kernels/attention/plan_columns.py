"""The columns of the plans' tables, and sizes that plans and kernels share.

Separate from the plans because the processes that compile kernels import no torch.
"""

from __future__ import annotations

from enum import IntEnum

# size of a block in the table of pair biases: see TilePlan.pair_blocks
PAIR_QUERIES, PAIR_KEYS = 128, 64


class TileColumn(IntEnum):
    """Columns of a table of tiles."""

    START = 0  # the sample's first token in the batch
    LENGTH = 1  # tokens of the sample
    HISTORY = 2  # tokens before its candidates
    ROW = 3  # the tile's first token in the sample
    PAIRS = 4  # the sample's first block in the table of pair biases
    FIRST = 5  # queries before it are left out: a multiple of PAIR_QUERIES
    SUMS = 6  # numbers that the tiles before it have in a part of the sums by distance


class SampleColumn(IntEnum):
    """Columns of a table of samples."""

    START = 0  # the sample's first token in the batch
    LENGTH = 1  # tokens of the sample
    HISTORY = 2  # tokens before its candidates


class NewEventColumn(IntEnum):
    """Columns of a table of users with one new event each, int64. Those that follow are the
    addresses of the rows where the event's own columns go."""

    KEYS = 0  # address of the history's keys [layers, heads, SLOTS, d_qk]; 0: no user
    VALUES = 1  # address of its values [layers, heads, SLOTS, d_v]
    SLOTS = 2
    PREFIX = 3  # tokens before the history
    LENGTH = 4  # events before the new one
    SKIPPED = 5  # events after the first visible ones without keys and values
    TIMES = 6  # address of the events' times
    OUTPUT = 7  # address of the last output [width]
