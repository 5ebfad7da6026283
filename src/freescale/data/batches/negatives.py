"""Which items targets compete with: the choices of the options, and the negatives of a batch with
the probabilities of their draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged
from freescale.data.batches.alias import AliasTable
from freescale.data.batches.negative_draws import (
    derive_batch_key,
    derive_position_keys,
    draw_negatives,
)

NEGATIVES_FROM = ("auto", "uniform", "popularity", "all")
NEGATIVES_PER = ("auto", "sample", "position", "batch")
# Events of a mean history below which a batch shares its negatives. A sample's own are rows that
# few positions use: 256 rows for 6 positions cost many times what the positions do.
SHORT = 32.0
# Items of the largest catalogue that can be negatives all at once. Every rank fetches the rows of
# all of them in every step, and every position is multiplied with them.
LARGEST_CATALOGUE = 1 << 17
# Items of the largest catalogue that is counted without being asked for: 84 MB in every process.
LARGEST_UNASKED = 1 << 22
# Items of the largest catalogue whose counts are kept, with 20 bytes each in every process.
LARGEST_COUNTED = 1 << 28


def choose_negatives_per(
    asked: str, mean_length: float, source: str = "uniform", count: int | None = None
) -> str:
    """What has negatives of its own: `sample`, `position` or `batch`.

    Args:
        asked: One of these, or `auto`, which leaves it to this rule.
        mean_length: Events of a history, on average over the file.
        source: One of `NEGATIVES_FROM`. All items are the same for every position.
        count: How many negatives are asked for; None: not said. A number without a word about
            what it is of is of a sample.
    """
    if source == "all":
        return "batch"
    if asked != "auto":
        return asked
    return "batch" if mean_length < SHORT and count is None else "sample"


def choose_negatives_from(asked: str, per: str, num_items: int | None, log_q: bool | None) -> str:
    """What negatives are drawn from: `uniform`, `popularity` or `all`.

    A batch that shares its negatives reaches few items in a step. Those that are drawn by
    popularity, with the correction for it, compete with the targets; of items drawn alike most
    are of the long tail and teach little.

    Args:
        asked: One of these, or `auto`, which leaves it to this rule.
        per: What has negatives of its own.
        num_items: Size of the catalogue, whose items would have to be counted; None: there is none.
        log_q: Whether logits are corrected; False: it is asked not to.
    """
    if asked != "auto":
        return asked
    countable = num_items is not None and num_items <= LARGEST_UNASKED and log_q is not False
    return "popularity" if per == "batch" and countable else "uniform"


def choose_negatives(asked: int | None, per: str) -> int:
    """How many negatives each sample, position or batch (`per`) has, where they are drawn. A batch
    has more: its positions, of all samples, see no others."""
    if asked is not None:
        return asked
    return 1024 if per == "batch" else 256


def choose_log_q(asked: bool | None, source: str, in_batch_share: float) -> bool:
    """Whether logits are corrected for the probabilities of the draws. Where these are all equal
    the correction changes nothing; the full softmax draws nothing."""
    unequal = source == "popularity" or (source != "all" and in_batch_share > 0)
    return unequal and asked is not False


def check_catalogue(num_items: int, asked: int | None, in_batch_share: float) -> None:
    """Refuses options that do not go with the full softmax.

    Args:
        num_items: Size of the catalogue.
        asked: How many negatives are asked for; None: not said.
        in_batch_share: Share of them that is asked of the batch.
    """
    if num_items > LARGEST_CATALOGUE:
        raise ValueError(
            f"--negatives-from all takes up to {LARGEST_CATALOGUE:,} items, the catalogue has "
            f"{num_items:,}: every rank reads all their rows in every step; draw some with "
            "--negatives-from uniform or popularity"
        )
    if asked not in (None, num_items):
        raise ValueError(
            f"--negatives {asked} with --negatives-from all: all {num_items:,} items are "
            "negatives; leave --negatives out"
        )
    if in_batch_share:
        raise ValueError(
            f"--in-batch-share {in_batch_share:g} with --negatives-from all: the targets of the "
            "batch are among all items; leave it out"
        )


def check_in_batch(source: str, in_batch_share: float) -> None:
    """Refuses negatives that a dynamic table cannot have."""
    if source == "all" or in_batch_share < 1:
        raise ValueError(
            f"negatives_from {source!r} with in_batch_share {in_batch_share:g}: a dynamic table "
            "has no catalogue that negatives could be drawn from; take those of the batch, "
            "in_batch_share 1"
        )


def check_countable(num_items: int) -> None:
    """Refuses a catalogue whose items are too many to keep the probability of each."""
    if num_items > LARGEST_COUNTED:
        raise ValueError(
            f"the catalogue has {num_items:,} items; popularity and log-q are for up to "
            f"{LARGEST_COUNTED:,}: use --negatives-from uniform and --no-log-q"
        )


class DrawnNegatives(NamedTuple):
    """Columns of a batch, by the part that they belong to."""

    dense: Mapping[str, Tensor]  # of samples, each [samples, negatives]
    sequences: Mapping[str, Tensor]  # of positions, each [tokens] or [tokens, negatives]
    shared: Mapping[str, Tensor]  # of the batch, each [negatives]


@dataclass(frozen=True)
class NegativeSampler:
    """Draws the negatives of a rank's slice of a batch.

    Args:
        per: `sample`, `position` or `batch`.
        count: Of each of these.
        in_batch: How many of them are targets of other samples.
        halo: How many samples further these come from, at most; those of a batch come from all of
            its samples.
        seed: Of the run.
        num_items: Ids are below it. None: there is no catalogue, and all come from the batch.
        popularity: What those that are not from the batch are drawn from; None: uniform.
        log_q: [num_items] float32 log of the probability that a draw is each item, to correct
            logits with; None: no correction.
        whole: The negatives are all items, once each; nothing is drawn.
    """

    per: str
    count: int
    in_batch: int
    halo: int
    seed: int
    num_items: int | None
    popularity: AliasTable | None = None
    log_q: Tensor | None = None
    whole: bool = False

    def draw(
        self, number: int, keys: Tensor, targets: Jagged, low: int, size: int
    ) -> DrawnNegatives:
        """The negatives of a slice of batch `number`, with what corrects for their probabilities.

        Args:
            number: Of the global batch.
            keys: [own] of the slice's samples.
            targets: Of the slice's samples, then of those after them (`count_beyond`).
            low: Place of the slice's first sample in the global batch.
            size: Samples of the global batch.
        """
        if self.whole and self.num_items is not None:
            return DrawnNegatives({}, {}, {"negatives": torch.arange(self.num_items)})
        own = int(targets.lengths.numpy()[: len(keys)].sum())  # of all targets
        homes, halo = None, min(self.halo, size - 1)  # a sample is never in its own halo
        if self.per == "position":
            keys, homes = derive_position_keys(keys, targets.lengths[: len(keys)])
        elif self.per == "batch":
            # counted from the batch's first sample, wherever the slice begins
            keys, homes, halo = derive_batch_key(self.seed, number), torch.tensor([-low - 1]), size
        negatives = draw_negatives(
            keys,
            targets,
            count=self.count,
            in_batch=self.in_batch,
            halo=halo,
            batch_size=size,
            num_items=self.num_items,
            homes=homes,
            popularity=self.popularity,
        )
        columns, sequences = {"negatives": negatives}, {}
        if self.log_q is not None:
            log_q = self.log_q.numpy()
            columns["negatives_log_q"] = torch.from_numpy(log_q[negatives.numpy()])
            sequences["targets_log_q"] = torch.from_numpy(log_q[targets.values.numpy()[:own]])
        if self.per == "sample":
            return DrawnNegatives(columns, sequences, {})
        if self.per == "position":
            return DrawnNegatives({}, sequences | columns, {})
        return DrawnNegatives({}, sequences, {name: rows[0] for name, rows in columns.items()})

    def count_beyond(self, size: int, own: int) -> int:
        """Samples after a slice of `own` samples that its in-batch negatives may come from: the
        halo, or all of the batch for those that it shares."""
        if not self.in_batch:
            return 0
        if self.per == "batch":
            return size - own
        return min(self.halo, size - 1) if own else 0


def mix_log_q(
    catalogue: NDArray[np.float64], batch: NDArray[np.float64], empty: float, share: float
) -> Tensor:
    """The log of the probability that a draw is each item, over all batches.

    Args:
        catalogue: [items] of a draw from the catalogue.
        batch: [items] of a sample's target: a sample, then one of its targets; of samples without
            targets nothing.
        empty: Share of samples without targets, for which the catalogue steps in.
        share: Of the draws that are targets of samples.

    Returns:
        [items] float32; -inf where it is 0.
    """
    mixed = share * batch + (1 - share + share * empty) * catalogue
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(mixed).astype(np.float32))
