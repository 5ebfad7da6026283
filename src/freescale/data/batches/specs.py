"""What `Histories` reads: its options, grouped and checked.

Defaults are those of `freescale train`, except for `ReadSpec.epochs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from freescale.config import DataConfig, ModelConfig, TrainConfig

TASKS = ("retrieval", "ranking")
PARTS = ("train", "validation", "test")
SPLITS = ("leave-one-out", "time", "windows", "none")
NEGATIVES_FROM = ("auto", "uniform", "popularity", "all")
NEGATIVES_PER = ("auto", "sample", "position", "batch")


@dataclass(frozen=True)
class SampleSpec:
    """What a sample holds.

    Args:
        task: `retrieval` or `ranking`.
        tasks: Label columns, for ranking.
        max_length: Longest history; longer ones keep their last events.
        candidates: Candidates per sample, at most, for ranking.
    """

    task: str = ModelConfig.task
    tasks: Sequence[str] = ()
    max_length: int = DataConfig.max_length
    candidates: int = DataConfig.candidates

    def __post_init__(self) -> None:
        _check_choice("task", self.task, TASKS)
        check_least(1, max_length=self.max_length, candidates=self.candidates)
        object.__setattr__(self, "tasks", tuple(self.tasks))


@dataclass(frozen=True)
class SplitSpec:
    """How histories are split, and which part is read.

    Args:
        kind: `leave-one-out`, `time` or `none`; `windows`, in order of time.
        time: With kind `time`: events at or after it, in the file's unit, are held out. With
            `windows`: statistics are those of the events before it.
        part: `train`, `validation` or `test`.
        since: Of the train part, only events later than this are targets or candidates, in the
            file's unit. None: all.
    """

    kind: str = DataConfig.split
    time: int | None = DataConfig.split_time
    part: str = "train"
    since: int | None = None

    def __post_init__(self) -> None:
        _check_choice("part", self.part, PARTS)
        _check_choice("split", self.kind, SPLITS)
        if self.since is not None and self.part != "train":
            raise ValueError(f"since is for the part 'train', and the part is {self.part!r}")
        if self.kind == "none" and self.part != "train":
            raise ValueError(
                f"part {self.part!r} with split 'none': nothing is held out; choose "
                "leave-one-out or time"
            )
        if (self.kind in ("time", "windows")) != (self.time is not None):
            raise ValueError(
                f"split {self.kind!r} with time {self.time}; give it with split 'time', and only "
                "then"
            )


@dataclass(frozen=True)
class NegativeSpec:
    """Which items targets compete with, for retrieval.

    Args:
        count: Negatives of each sample, position or batch. None: 1,024 of a batch, else 256.
        per: `sample`, `position` or `batch`. `auto`: `batch` if histories are short on average and
            `count` is None, else `sample`.
        source: `uniform` over the catalogue, by `popularity`, or `all`: the whole catalogue,
            without draws. `auto`: by popularity for those of a batch, else uniform.
        popularity_power: Items are drawn by their counts in the train part to this power.
        in_batch_share: Share of the negatives that are targets of other samples of the batch.
        log_q: Include log-q in batches. None: yes, if items are not drawn uniformly. Popularity
            and log-q need counts: the whole file is read before the first batch.
        halo: In-batch negatives come from this many following samples; those of a batch from all.
    """

    count: int | None = DataConfig.negatives
    per: str = DataConfig.negatives_per
    source: str = DataConfig.negatives_from
    popularity_power: float = DataConfig.popularity_power
    in_batch_share: float = DataConfig.in_batch_share
    log_q: bool | None = DataConfig.log_q
    halo: int = 16

    def __post_init__(self) -> None:
        _check_choice("negatives_per", self.per, NEGATIVES_PER)
        _check_choice("negatives_from", self.source, NEGATIVES_FROM)
        check_least(0, negatives=self.count or 0, halo=self.halo)
        if not 0 <= self.in_batch_share <= 1:
            raise ValueError(f"in_batch_share is {self.in_batch_share}; it must be in [0, 1]")


@dataclass(frozen=True)
class ReadSpec:
    """How a histories file is read.

    Args:
        seed: Of the order and the negatives.
        shuffle: Whether each epoch has its own order.
        shuffle_groups: Row groups that are shuffled together.
        kept_bytes: Decoded row groups that stay in memory, in addition to those that are shuffled
            together. A file that fits is read once.
        epochs: Epochs of the run.
        start: First batch to yield, counted over the run.
        num_items: Rows of the item table; by default the largest id plus 1.
        least_items: The table has as many, also if no id is as large.
        any_ids: Items are arbitrary 64-bit ids of a dynamic table. All negatives come from the
            batch, and the table itself counts what log-q needs.
    """

    seed: int = TrainConfig.seed
    shuffle: bool = DataConfig.shuffle
    shuffle_groups: int = 8
    kept_bytes: int = 128 << 20
    epochs: int = 1
    start: int = 0
    num_items: int | None = DataConfig.num_items
    least_items: int = 0
    any_ids: bool = False

    def __post_init__(self) -> None:
        check_least(1, shuffle_groups=self.shuffle_groups, epochs=self.epochs)
        check_least(0, kept_bytes=self.kept_bytes)


class Features(Protocol):
    """The features of items and events, as rows of a table for each (`FeatureStore`)."""

    fingerprint: str  # changes with the sources and the settings
    lines: tuple[str, ...]  # a report of what was read
    vocabulary: Path | None  # vocabulary of the data, with further items of --items
    item_rows: int  # rows of the table of item features; 0: items have none
    event_rows: int
    context_rows: int
    user_rows: int
    user_places: tuple[int, ...]  # values of each feature of the users
    item_places: int  # values of all features of an item; 0: items have none
    context_places: int
    event_columns: tuple[str, ...]  # columns of the histories that features of events are made of
    vector_widths: tuple[int, ...]  # numbers of each feature of items that is a vector

    def copy_statistics(self, folder: Path, schema: str | None = None) -> None:
        """Copies what the training part says into the folder of a run: all that is needed to encode
        other data; and the file of the run's `schema`."""

    def refresh(self) -> None:
        """Reads the values that a stream has brought since."""

    def find_users(self, samples: NDArray[np.int64]) -> Tensor:
        """Samples [n] of the histories file, of a stream users [n] -> rows [n, places] int64 of
        user features."""

    def find_events(
        self,
        columns: Mapping[str, NDArray[Any]],
        *,
        context: bool = False,
        samples: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Columns [n] of the histories file -> rows [n, places] int64 of the features of these
        events, or of the requests that they answer. `samples` [n]: whose they are, for features
        that are made of several sources."""

    def find_items(self, ids: Tensor, batch: int | None = None) -> tuple[Tensor, Tensor]:
        """Item ids [...] -> rows of their features [..., places] int64, and how much the item's own
        row counts [...] float32. `batch`: number of a training batch; some of its ids drop out."""

    def load_vectors(self) -> list[Tensor]:
        """[items + 1, width] float16 of each such feature. The last row is of no item."""

    def find_vectors(self, ids: Tensor) -> Tensor:
        """Item ids [...] -> rows [...] int64 of these tensors."""


def check_least(least: int, **options: float) -> None:
    """Raises ValueError for an option below `least`."""
    for name, value in options.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be {least} or more")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def find_dtype(column: str) -> type[np.int64] | type[np.float32] | type[np.float64]:
    """The type of a column of events in batches."""
    if column in ("item_id", "timestamp", "action") or column.startswith("category."):
        return np.int64
    return np.float64 if column.startswith("number.") else np.float32
