"""Sizes of MLPerf's dlrm_v4_hstu, its model in FreeScale, and generated batches.

Items have an artist and an album, which share the table of item features; requests have a user and
seven crosses, which share that of context. Ids follow a power law, as those of a catalogue of music
do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.models import DlrmHSTU, DlrmRanking, FeatureTables

TASK = "listen_plus"
ACTIONS = 8  # of three bits
NOW = 1_700_000_000  # seconds since 1970
_SKEW = 3.0  # of the power law
_ROWS = (9_390_624, 1_293_395, 3_367_692)
_CONTEXT = tuple(round(1e6 * rows) for rows in (1.000001, 100, 40, 24, 40, 32, 2, 40))


@dataclass(frozen=True)
class Shape:
    """A model and its tables.

    Args:
        name: in results.
        longest: events of a history, at most.
        rows: of items, artists and albums.
        context: rows of the user and the crosses.
    """

    name: str
    width: int = 512
    heads: int = 4
    layers: int = 3
    longest: int = 4087  # with 8 tokens of context and a candidate 4,096
    positions: int = 8192
    time_buckets: int = 2048
    hidden: int = 256  # of the networks before the encoder
    rows: tuple[int, int, int] = _ROWS
    context: tuple[int, ...] = _CONTEXT

    @property
    def tokens(self) -> int:
        """Tokens of a sample with the longest history."""
        return len(self.context) + self.longest + 1

    def divide(self, parts: int) -> Shape:
        """The share of every table that one of several GPUs has."""
        items, artists, albums = (-(-rows // parts) for rows in self.rows)
        context = tuple(-(-rows // parts) for rows in self.context)
        return replace(self, rows=(items, artists, albums), context=context)


FULL = Shape("dlrm_v4_hstu")
SMALL = Shape(
    "trial", 32, 2, 2, longest=50, positions=64, time_buckets=31, rows=(200, 40, 60),
    context=(50, *(20,) * 7),
)  # fmt: skip


def build_model(shape: Shape, table_device: str | None = None) -> DlrmRanking:
    """Builds the model without dropout."""
    encoder = DlrmHSTU(
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        context=len(shape.context),
        positions=shape.positions,
        time_buckets=shape.time_buckets,
        max_length=shape.tokens,
        dropout=0.0,
    )
    tables = FeatureTables(
        sum(shape.rows[1:]),
        context=sum(shape.context),
        item_places=2,
        context_places=len(shape.context),
    )
    return DlrmRanking(
        encoder,
        num_items=shape.rows[0],
        tasks=(TASK,),
        num_actions=ACTIONS,
        feature_tables=tables,
        table_device=table_device,
        input_hidden=shape.hidden,
        head_hidden=512,
    )


def draw_lengths(shape: Shape, samples: int, mixed: bool, seed: int) -> NDArray[np.int64]:
    """Histories of a batch: all the longest, or with Yambda's spread: a log-normal with its median
    of 2,695 and mean of 4,763 events a user, cut at the longest."""
    if not mixed:
        return np.full(samples, shape.longest)
    median = 2695 * shape.longest / FULL.longest
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.067, samples)
    found: NDArray[np.int64] = drawn.astype(np.int64).clip(1, shape.longest)
    return found


def make_batch(
    shape: Shape, lengths: NDArray[np.int64], seed: int, skew: float = _SKEW
) -> SequenceBatch:
    """Makes a batch of one candidate a sample, with histories of these lengths. With a `skew` of 1
    ids are uniform."""
    generator = torch.Generator().manual_seed(seed)
    events, samples = torch.from_numpy(lengths), len(lengths)
    tokens, ones = int(lengths.sum()), torch.ones(samples, dtype=torch.int64)

    def draw(rows: int, count: int) -> Tensor:
        places = torch.rand(count, generator=generator, dtype=torch.float64) ** skew
        return (places * rows).long()

    def describe(rows: tuple[int, ...], count: int) -> Tensor:
        firsts = accumulate(rows[:-1], initial=0)
        return torch.stack([first + draw(n, count) for first, n in zip(firsts, rows)], dim=1)

    # seconds before the request, most recent last
    gaps = torch.randint(30, 7200, (tokens,), generator=generator).cumsum(0)
    ends = torch.repeat_interleave(gaps[events.cumsum(0) - 1], events)
    now = NOW + torch.randint(0, 86_400, (samples,), generator=generator)
    times = torch.repeat_interleave(now, events) - 60 - (ends - gaps)
    labels = torch.randint(0, 2, (samples, 1), generator=generator).float()
    sequences = {
        "history": Jagged(draw(shape.rows[0], tokens), events),
        "history_features": Jagged(describe(shape.rows[1:], tokens), events),
        "actions": Jagged(torch.randint(1, ACTIONS, (tokens,), generator=generator), events),
        "timestamps": Jagged(times, events),
        "candidate_timestamps": Jagged(now, ones),
        "candidates_features": Jagged(describe(shape.rows[1:], samples), ones),
        "context_features": Jagged(describe(shape.context, samples), ones),
        "labels": Jagged(labels, ones),
    }
    candidates = {"candidates": Nested(draw(shape.rows[0], samples), ones, ones)}
    keys = torch.arange(samples) + samples * seed
    weights = {TASK: ones.float()}
    return SequenceBatch(sequences, candidates, weights=weights, keys=keys, number=seed).check()
