"""Which items targets compete with: automatic choices, and the negatives of a batch with the
probabilities of their draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged
from freescale.data.batches.alias import AliasTable
from freescale.data.batches.specs import NegativeSpec
from freescale.data.batches.splits import WANTED
from freescale.data.batches.windows import EventReader
from freescale.data.histories import HistoriesFile
from freescale.random import derive, hash_name, integers, mix_in_place

_UNIFORM, _COIN, _SAMPLE, _POSITION = (
    hash_name("uniform negative"),
    hash_name("negative or alias"),
    hash_name("negative's sample"),
    hash_name("negative's position"),
)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # of random.derive, as an unsigned number
_TOKEN, _BATCH = hash_name("negatives of a position"), hash_name("negatives of a batch")
# Mean events per history below which a batch shares its negatives. A sample's own are rows that
# few positions use: 256 rows for 6 positions cost many times what the positions do.
SHORT = 32.0
# Largest catalogue for the full softmax: every rank fetches all rows in every step.
LARGEST_CATALOGUE = 1 << 17
# Largest catalogue that is counted by default: 84 MB in every process.
LARGEST_BY_DEFAULT = 1 << 22
# Largest catalogue that can be counted, at 20 bytes per item in every process.
LARGEST_COUNTED = 1 << 28


def choose_negatives_per(
    per: str, mean_length: float, source: str = "uniform", count: int | None = None
) -> str:
    """What has its own negatives: `sample`, `position` or `batch`.

    With source `all`, every position has the same negatives. `auto` depends on the file's mean
    length; a given `count` is then per sample.
    """
    if source == "all":
        return "batch"
    if per != "auto":
        return per
    return "batch" if mean_length < SHORT and count is None else "sample"


def choose_negatives_from(source: str, per: str, num_items: int | None, log_q: bool | None) -> str:
    """What negatives are drawn from: `uniform`, `popularity` or `all`; `auto` leaves it to this
    rule.

    A batch that shares its negatives reaches few items in a step. Popular items, with the
    correction, compete with the targets; uniform draws are mostly from the long tail and teach
    little. `num_items` would have to be counted (None: no catalogue), and `log_q` False rules the
    correction out.
    """
    if source != "auto":
        return source
    countable = num_items is not None and num_items <= LARGEST_BY_DEFAULT and log_q is not False
    return "popularity" if per == "batch" and countable else "uniform"


def choose_negatives(count: int | None, per: str) -> int:
    """Negatives per sample, position or batch (`per`). A batch has more: all its positions share
    them."""
    if count is not None:
        return count
    return 1024 if per == "batch" else 256


def choose_log_q(log_q: bool | None, source: str, in_batch_share: float) -> bool:
    """Whether logits are corrected for the probabilities of the draws. If all are equal, the
    correction changes nothing; the full softmax draws nothing."""
    unequal = source == "popularity" or (source != "all" and in_batch_share > 0)
    return unequal and log_q is not False


def resolve_negatives(
    spec: NegativeSpec, file: HistoriesFile, max_length: int, training: bool
) -> NegativeSpec:
    """Replaces every automatic choice by its result.

    `max_length` is that of a sample; `training` says whether batches have negatives. Raises
    ValueError if the catalogue does not allow a choice.
    """
    per = choose_negatives_per(spec.per, min(file.mean_length, max_length), spec.source, spec.count)
    if file.any_ids and training and (spec.source == "all" or spec.in_batch_share < 1):
        raise ValueError(
            f"negatives_from {spec.source!r} with in_batch_share {spec.in_batch_share:g}: a "
            "dynamic table has no catalogue to draw negatives from; use those of the batch, "
            "in_batch_share 1"
        )
    num_items = None if file.any_ids else file.num_items
    source = choose_negatives_from(spec.source, per, num_items, spec.log_q)
    count = choose_negatives(spec.count, per)
    if source == "all" and training:
        _check_catalogue(file.num_items, spec)
        count = file.num_items
    log_q = choose_log_q(spec.log_q, source, spec.in_batch_share)
    if num_items is not None and num_items > LARGEST_COUNTED and (log_q or source == "popularity"):
        raise ValueError(
            f"the catalogue has {num_items:,} items; popularity and log-q are for up to "
            f"{LARGEST_COUNTED:,}: use --negatives-from uniform and --no-log-q"
        )
    return replace(spec, count=count, per=per, source=source, log_q=log_q)


def _check_catalogue(num_items: int, spec: NegativeSpec) -> None:
    """Refuses options that contradict the full softmax."""
    if num_items > LARGEST_CATALOGUE:
        raise ValueError(
            f"--negatives-from all takes up to {LARGEST_CATALOGUE:,} items, the catalogue has "
            f"{num_items:,}: every rank reads all their rows in every step; draw some with "
            "--negatives-from uniform or popularity"
        )
    if spec.count not in (None, num_items):
        raise ValueError(
            f"--negatives {spec.count} with --negatives-from all: all {num_items:,} items are "
            "negatives; leave --negatives out"
        )
    if spec.in_batch_share:
        raise ValueError(
            f"--in-batch-share {spec.in_batch_share:g} with --negatives-from all: the targets of "
            "the batch are among all items; leave it out"
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
        spec: Resolved by `resolve_negatives`. In-batch negatives of a batch come from all its
            samples, others from the next `halo`.
        seed: Of the run.
        num_items: Ids are below it. None: there is no catalogue, and all come from the batch.
        popularity: Distribution over the catalogue; None: uniform.
        log_q: [num_items] float32 log-probability of drawing each item; None: no correction.
    """

    spec: NegativeSpec
    seed: int
    num_items: int | None
    popularity: AliasTable | None = None
    log_q: Tensor | None = None

    @property
    def in_batch(self) -> int:
        """Negatives that are targets of other samples."""
        return _count_in_batch(self.spec)

    def draw(
        self, number: int, keys: Tensor, targets: Jagged, low: int, size: int
    ) -> DrawnNegatives:
        """Draws the negatives of a slice of batch `number`, and looks up their log-q.

        The slice has samples of `keys` [own], from place `low` on in a batch of `size`. `targets`
        are theirs, then those of the samples after them (`count_beyond`).
        """
        if self.spec.source == "all" and self.num_items is not None:
            return DrawnNegatives({}, {}, {"negatives": torch.arange(self.num_items)})
        own = int(targets.lengths.numpy()[: len(keys)].sum())  # targets of the slice
        homes, halo = None, min(self.spec.halo, size - 1)  # a sample is never in its own halo
        if self.spec.per == "position":
            keys, homes = derive_position_keys(keys, targets.lengths[: len(keys)])
        elif self.spec.per == "batch":
            # counted from the batch's first sample, wherever the slice begins
            keys, homes, halo = derive_batch_key(self.seed, number), torch.tensor([-low - 1]), size
        negatives = draw_negatives(
            keys,
            targets,
            count=choose_negatives(self.spec.count, self.spec.per),
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
        if self.spec.per == "sample":
            return DrawnNegatives(columns, sequences, {})
        if self.spec.per == "position":
            return DrawnNegatives({}, sequences | columns, {})
        return DrawnNegatives({}, sequences, {name: rows[0] for name, rows in columns.items()})

    def count_beyond(self, size: int, own: int) -> int:
        """How many samples after a slice of `own` its in-batch negatives may come from."""
        if not self.in_batch:
            return 0
        if self.spec.per == "batch":
            return size - own
        return min(self.spec.halo, size - 1) if own else 0


def build_sampler(
    spec: NegativeSpec, file: HistoriesFile, reader: EventReader, seed: int
) -> NegativeSampler:
    """Builds the sampler of a resolved spec. Popularity and log-q read the whole file."""
    if file.any_ids:
        return NegativeSampler(spec, seed, None)
    weights = popularity = log_q = None
    if spec.source == "popularity":
        weights = reader.count_items().numpy() ** spec.popularity_power
        if not weights.any():
            raise ValueError(
                f"{file.path}: the train part holds no events to draw popular items from: {WANTED}"
            )
        popularity = AliasTable.of(weights)
    if spec.log_q:
        weights = np.ones(file.num_items) if weights is None else weights
        catalogue, share = weights / weights.sum(), 0.0
        targets, empty = np.zeros(file.num_items), 0.0
        in_batch = _count_in_batch(spec)
        if in_batch and (spec.per == "batch" or spec.halo):
            share = in_batch / choose_negatives(spec.count, spec.per)
            targets, empty = reader.share_targets()
        log_q = mix_log_q(catalogue, targets, empty, share)
    return NegativeSampler(spec, seed, file.num_items, popularity, log_q)


def _count_in_batch(spec: NegativeSpec) -> int:
    return round(choose_negatives(spec.count, spec.per) * spec.in_batch_share)


def mix_log_q(
    catalogue: NDArray[np.float64], batch: NDArray[np.float64], empty: float, share: float
) -> Tensor:
    """Log-probability [items] float32 of drawing each item, over all batches; -inf for 0.

    `catalogue` [items] is the distribution over the catalogue. `batch` [items] is that of drawing a
    sample, then one of its targets; samples without any, a share of `empty`, draw from the
    catalogue. `share` of the draws are targets.
    """
    mixed = share * batch + (1 - share + share * empty) * catalogue
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(mixed).astype(np.float32))


def draw_negatives(
    keys: Tensor,
    targets: Jagged,
    *,
    count: int,
    in_batch: int,
    halo: int,
    batch_size: int,
    num_items: int | None,
    homes: Tensor | None = None,
    popularity: AliasTable | None = None,
) -> Tensor:
    """Draws negatives: some from the targets of other samples, the rest from the catalogue.

    Args:
        keys: [n] random keys: of samples, of positions or of a batch.
        targets: Of this rank's samples, then of as many samples that follow them in the global
            batch (cyclically) as the halo needs.
        count: Negatives per key.
        in_batch: How many of these are targets of the next `halo` samples. A sample without
            targets is replaced by a draw from the catalogue.
        halo: Samples.
        batch_size: Of the global batch.
        num_items: Ids are below it. None: there is no catalogue; all negatives are targets of
            those of the next `halo` samples that have some.
        homes: [n] the sample of each key, among those of the targets; by default key i is of
            sample i.
        popularity: The distribution over the catalogue; None: uniform.

    Returns:
        [n, count] item ids.
    """
    homes = torch.arange(len(keys)) if homes is None else homes
    if num_items is None:
        return _draw_targets(keys, targets, count, halo, batch_size, homes)
    drawn = _draw_uniformly(keys.numpy(), count, num_items)  # [n, count]
    if popularity is not None:
        drawn = popularity.choose(drawn, _draw_coins(keys.numpy(), count))
    negatives = torch.from_numpy(drawn)
    if in_batch == 0 or halo <= 0 or targets.values.numel() == 0:
        return negatives
    numbers = torch.arange(in_batch)
    step = 1 + integers(derive(keys[:, None], _SAMPLE, numbers), halo)  # [n, in_batch]
    chosen = (homes[:, None] + step) % batch_size
    found = _choose_targets(keys, targets, chosen)
    some = targets.lengths[chosen] > 0
    negatives[:, :in_batch] = torch.where(some, found, negatives[:, :in_batch])
    return negatives


def _draw_targets(
    keys: Tensor, targets: Jagged, count: int, halo: int, batch_size: int, homes: Tensor
) -> Tensor:
    """[n, count] targets of the next `halo` samples that have any; 0 if none has."""
    if halo <= 0 or not targets.values.numel():
        return torch.zeros(len(keys), count, dtype=torch.int64)
    some = torch.zeros(batch_size, dtype=torch.int64)
    some[: len(targets.lengths)] = targets.lengths > 0
    before = torch.cat([torch.zeros(1, dtype=torch.int64), some.repeat(2).cumsum(0)])
    first = homes % batch_size + 1  # of the halo, [n]
    able = before[first + halo] - before[first]  # samples of the halo with targets
    numbers = torch.arange(count)
    step = integers(derive(keys[:, None], _SAMPLE, numbers), able.clamp(min=1)[:, None])
    wanted = before[first][:, None] + step  # samples with targets before it
    chosen = (torch.searchsorted(before, wanted, right=True) - 1) % batch_size
    chosen = torch.where(able[:, None] > 0, chosen, 0)
    return torch.where(able[:, None] > 0, _choose_targets(keys, targets, chosen), 0)


def _choose_targets(keys: Tensor, targets: Jagged, chosen: Tensor) -> Tensor:
    """[n, count] a target of each of the samples `chosen` [n, count]; any for those without."""
    lengths, numbers = targets.lengths[chosen], torch.arange(chosen.shape[1])
    drawn = integers(derive(keys[:, None], _POSITION, numbers), lengths.clamp(min=1))
    place = targets.offsets[chosen] + drawn
    return targets.values[place.clamp(max=targets.values.numel() - 1)]


def derive_position_keys(keys: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [tokens] of the samples' positions, and the sample [tokens] of each."""
    homes = torch.repeat_interleave(torch.arange(len(keys)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    places = torch.arange(len(homes)) - starts[homes]
    return derive(keys[homes], _TOKEN, places), homes


def derive_batch_key(seed: int, number: int) -> Tensor:
    """[1] the key of global batch `number`."""
    return derive(seed, _BATCH, number).reshape(1)


def _draw_uniformly(keys: NDArray[np.int64], count: int, bound: int) -> NDArray[np.int64]:
    """integers(derive(keys[:, None], _UNIFORM, arange(count)), bound)."""
    drawn = _draw_bits(keys, _UNIFORM, count)
    drawn >>= np.uint64(1)
    # a division by one number is many times faster than the remainder, for numpy
    quotient = np.floor_divide(drawn, np.uint64(bound))
    quotient *= np.uint64(bound)
    drawn -= quotient
    return drawn.view(np.int64)


def _draw_coins(keys: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """uniform(derive(keys[:, None], _COIN, arange(count)))."""
    drawn = _draw_bits(keys, _COIN, count)
    drawn >>= np.uint64(11)
    coins = drawn.astype(np.float64)
    coins *= 2.0**-53
    return coins


def _draw_bits(keys: NDArray[np.int64], name: int, count: int) -> NDArray[np.uint64]:
    """derive(keys[:, None], name, arange(count)) in place: most of a batch's draws are
    negatives."""
    base = derive(torch.from_numpy(keys), name).numpy().view(np.uint64)
    drawn: NDArray[np.uint64] = np.add.outer(
        base * _GOLDEN, np.arange(1, count + 1, dtype=np.uint64)
    )
    mix_in_place(drawn)
    return drawn
