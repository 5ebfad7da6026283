"""Rank slices of global batches, from a histories file.

Global batch n is the same set of samples in the same order for every number of ranks; a rank reads
its slice (and, for in-batch negatives, a few samples beyond it). Every batch is a pure function of
the file, the options and n: to resume is to start at another n.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.config import DataConfig, ModelConfig, TrainConfig
from freescale.data.batches.alias import AliasTable
from freescale.data.batches.epoch_order import EpochOrder
from freescale.data.batches.negatives import (
    NEGATIVES_FROM,
    NEGATIVES_PER,
    NegativeSampler,
    check_catalogue,
    check_countable,
    check_in_batch,
    choose_log_q,
    choose_negatives,
    choose_negatives_from,
    choose_negatives_per,
    mix_log_q,
)
from freescale.data.batches.splits import PARTS, SPLITS, WANTED, Split
from freescale.data.batches.windows import WindowReader, list_ranges
from freescale.data.histories import HistoriesFile
from freescale.data.labels import check_labels
from freescale.random import derive

TASKS = ("retrieval", "ranking")
# The columns of a file and what a batch calls them.
_NAMES = {"item_id": "history", "timestamp": "timestamps", "action": "actions"}


class Histories:
    """Iterable of one rank's batches: the batches [start, epochs * batches_per_epoch) of the run.

    A sample is one user. Of its events the part takes:

    | split         | train            | validation: history, target | test: history, target |
    |---------------|------------------|-----------------------------|-----------------------|
    | leave-one-out | all but last two | [:-2], [-2]                 | [:-1], [-1]           |
    | time          | [:c-1]           | [:c-1], [c-1]               | [:c], [c]             |
    | none          | all              |                             |                       |

    where c is the number of events before `split_time`.

    A sample without history or target stays in its place, with empty sequences and weight 0.

    | task, part       | sequences                               | beside them                    |
    |------------------|-----------------------------------------|--------------------------------|
    | retrieval, train | history, timestamps, [actions], targets | negatives                      |
    | retrieval, else  | history, timestamps, [actions]          | dense target [n]               |
    | ranking          | history, timestamps, [actions],         | candidates                     |
    |                  | candidate_timestamps, labels [., tasks] |                                |

    Negatives of a sample are in `dense` [n, negatives], those of a position in `sequences`
    [tokens, negatives], those of the batch in `shared` [negatives], by `negatives_per`. With
    `log_q` their log-probabilities are beside them as `negatives_log_q`, those of the targets in
    `sequences` as `targets_log_q`.

    Targets are the next item of each event. Candidates of ranking are the last `candidates` events
    of the train part (fewer where the history would be empty); of the test part of split `time` the
    target and the events after it, up to as many; else the target. Not for two threads at once: it
    keeps the row groups that it read last.

    Args:
        path: A histories file, as `prepare` and `generate` write it.
        global_batch: Samples of a batch over all ranks.
        rank: This rank.
        world: Number of ranks.
        max_length: Longest history; of longer ones the last events are taken.
        task: `retrieval` or `ranking`.
        tasks: Label columns, for ranking.
        part: `train`, `validation` or `test`.
        split: `leave-one-out`, `time` or `none`.
        split_time: With split `time`: where it cuts, in the file's unit.
        negatives: How many each sample, position or batch has, for retrieval; None: by what it is.
        negatives_per: `sample`, `position` or `batch`; `auto`: `batch` where histories are short on
            average and `negatives` is None, else `sample`.
        negatives_from: What they are drawn from: `uniform` over the catalogue, by `popularity`, or
            `all`: not drawn, the whole catalogue; `auto`: by popularity those of a batch, uniform
            others.
        popularity_power: Items are drawn by their counts in the train part to this power.
        in_batch_share: Share of the negatives that are targets of other samples of the batch.
        log_q: Whether batches say how probable their negatives and targets were as draws, where
            items differ in that; None: yes. What popularity and `log_q` need is counted before the
            first batch, by reading the whole file.
        halo: How many samples further such negatives may come from.
        candidates: Candidates per sample, at most, for ranking.
        seed: Of the order and the negatives.
        shuffle: Whether an epoch has an order of its own.
        shuffle_groups: Row groups that are shuffled together.
        kept_bytes: Of decoded row groups that stay in memory beyond those that are shuffled
            together: what fits is read once.
        epochs: Of the run.
        start: First batch of the run to yield.
        num_items: Rows of the item table; by default the largest id plus 1.
        any_ids: Items are any numbers of 64 bits, those of a dynamic table. Negatives are of the
            batch alone, and the table itself counts what `log_q` needs.

    Raises:
        ValueError: An option is out of range, or the file does not fit it.
    """

    def __init__(
        self,
        path: str | Path,
        global_batch: int,
        *,
        rank: int = 0,
        world: int = 1,
        max_length: int = DataConfig.max_length,
        task: str = ModelConfig.task,
        tasks: Sequence[str] = (),
        part: str = "train",
        split: str = DataConfig.split,
        split_time: int | None = DataConfig.split_time,
        negatives: int | None = DataConfig.negatives,
        negatives_per: str = DataConfig.negatives_per,
        negatives_from: str = DataConfig.negatives_from,
        popularity_power: float = DataConfig.popularity_power,
        in_batch_share: float = DataConfig.in_batch_share,
        log_q: bool | None = DataConfig.log_q,
        halo: int = 16,
        candidates: int = DataConfig.candidates,
        seed: int = TrainConfig.seed,
        shuffle: bool = DataConfig.shuffle,
        shuffle_groups: int = 8,
        kept_bytes: int = 128 << 20,
        epochs: int = 1,
        start: int = 0,
        num_items: int | None = DataConfig.num_items,
        any_ids: bool = False,
    ):
        _check_choice("task", task, TASKS)
        _check_choice("part", part, PARTS)
        _check_choice("split", split, SPLITS)
        _check_choice("negatives_per", negatives_per, NEGATIVES_PER)
        _check_choice("negatives_from", negatives_from, NEGATIVES_FROM)
        for name, value, least in (
            ("global_batch", global_batch, 1),
            ("world", world, 1),
            ("max_length", max_length, 1),
            ("negatives", negatives or 0, 0),
            ("halo", halo, 0),
            ("candidates", candidates, 1),
            ("shuffle_groups", shuffle_groups, 1),
            ("kept_bytes", kept_bytes, 0),
            ("epochs", epochs, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be {least} or more")
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank}; with {world} ranks it must be in [0, {world})")
        if not 0 <= in_batch_share <= 1:
            raise ValueError(f"in_batch_share is {in_batch_share}; it must be in [0, 1]")
        if split == "none" and part != "train":
            raise ValueError(
                f"part {part!r} with split 'none': nothing is held out; choose "
                "leave-one-out or time"
            )
        if (split == "time") != (split_time is not None):
            raise ValueError(
                f"split {split!r} with split_time {split_time}; give it with split "
                "'time', and only then"
            )
        self.file = HistoriesFile(path, num_items, any_ids)
        self.global_batch = global_batch
        self.rank = rank
        self.world = world
        self.max_length = max_length
        self.task = task
        self.tasks = tuple(tasks)
        self.part = part
        self.split = split
        self.split_time = split_time
        self.halo, self.candidates = halo, candidates
        self.popularity_power, self.in_batch_share = popularity_power, in_batch_share
        self.negatives_per = choose_negatives_per(
            negatives_per, min(self.file.mean_length, max_length), negatives_from, negatives
        )
        if any_ids and part == "train" and task == "retrieval":
            check_in_batch(negatives_from, in_batch_share)
        self.negatives_from = negatives_from = choose_negatives_from(
            negatives_from, self.negatives_per, None if any_ids else self.num_items, log_q
        )
        if negatives_from == "all" and part == "train" and task == "retrieval":
            check_catalogue(self.num_items, negatives, in_batch_share)
            negatives = self.num_items
        self.negatives = choose_negatives(negatives, self.negatives_per)
        self.log_q = choose_log_q(log_q, negatives_from, in_batch_share)
        if not any_ids and (self.log_q or negatives_from == "popularity"):
            check_countable(self.num_items)
        self._sampler: NegativeSampler | None = None
        self.seed = seed
        self.shuffle = shuffle
        self.shuffle_groups = shuffle_groups
        self.kept_bytes = kept_bytes
        self.epochs = epochs
        self._check_tasks()
        present = self.file.columns
        self._columns = ("item_id", "timestamp", *(["action"] if "action" in present else []))
        self._open_reader()
        self._seek(start)

    def _open_reader(self) -> None:
        starts = torch.from_numpy(self.file.starts)
        self._order = EpochOrder(
            starts, seed=self.seed, shuffle=self.shuffle, window=self.shuffle_groups
        )
        ranking = self.task == "ranking"
        self._reader = WindowReader(
            self.file,
            self._order,
            Split(self.split, self.split_time),
            self.part,
            tuple(dict.fromkeys([*self._columns, *(self.tasks if ranking else ())])),
            max_length=self.max_length,
            tail=self.candidates if ranking and self.part != "validation" else 1,
            kept_groups=self.shuffle_groups + 2,
            kept_bytes=self.kept_bytes,
        )

    def __getstate__(self) -> dict[str, Any]:
        """For a process of its own: without what was read."""
        return {k: v for k, v in vars(self).items() if k not in ("_order", "_reader")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._open_reader()

    def _check_tasks(self) -> None:
        if self.task != "ranking":
            return
        labels = [name for name in self.file.columns if name not in ("item_id", "timestamp")]
        missing = [name for name in self.tasks if name not in labels]
        if missing or not self.tasks:
            raise ValueError(
                f"{self.file.path} {self._describe_missing(missing)}; it has "
                f"{', '.join(map(repr, labels)) or 'none'}: name labels that it has"
            )
        check_labels(self.file, self.tasks)

    @staticmethod
    def _describe_missing(labels: Sequence[str]) -> str:
        if not labels:
            return "is read for ranking, and no label is named"
        return f"has no label column {', '.join(map(repr, labels))}"

    def _seek(self, start: int) -> None:
        total = self.stop
        if not 0 <= start <= total:
            raise ValueError(
                f"start is {start}; the run has {total} batches, so it must be in [0, {total}]"
            )
        self.start = self.position = start

    @property
    def num_items(self) -> int:
        return self.file.num_items

    @property
    def any_ids(self) -> bool:
        """Whether items are any numbers of 64 bits."""
        return self.file.any_ids

    @property
    def num_actions(self) -> int:
        """Largest action plus one; 0 without actions."""
        return self.file.find_largest("action") + 1 if "action" in self.file.columns else 0

    @property
    def num_samples(self) -> int:
        return self.file.num_samples

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch)

    def batch_size(self, number: int) -> int:
        """Samples of global batch `number`: the last of an epoch may be smaller."""
        return min(
            self.global_batch,
            self.num_samples - number % self.batches_per_epoch * self.global_batch,
        )

    @property
    def stop(self) -> int:
        """Behind the last batch of the last epoch."""
        return self.epochs * self.batches_per_epoch

    def __len__(self) -> int:
        """How many batches an iteration yields: those from `start` to the end of the last epoch."""
        return self.stop - self.start

    def __iter__(self) -> Iterator[SequenceBatch]:
        for number in range(self.start, self.stop):
            batch = self.batch(number)
            self.position = number + 1
            yield batch

    def state_dict(self, next: int | None = None) -> dict[str, Any]:
        """`next`: the batch to go on with; by default the one after the last yielded (prefetching
        runs ahead)."""
        return {
            "next": self.position if next is None else next,
            "fingerprint": self.file.fingerprint,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shuffle_groups": self.shuffle_groups,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, ours in self.state_dict().items():
            if name != "next" and state.get(name) != ours:
                raise ValueError(
                    f"the data position was saved with {name} {state.get(name)!r}, this run has "
                    f"{ours!r}; "
                    "resume with the same data and options"
                )
        self._seek(state["next"])

    def batch(self, number: int) -> SequenceBatch:
        """This rank's slice of global batch `number`, counted over the whole run."""
        epoch, index = divmod(number, self.batches_per_epoch)
        first = index * self.global_batch
        size = self.batch_size(number)
        low, high = size * self.rank // self.world, size * (self.rank + 1) // self.world
        own = high - low
        training = self.part == "train"
        draws = training and self.task == "retrieval"
        # The slice, then the samples after it (round the batch) that its in-batch negatives may
        # come from.
        beyond = self._find_sampler().count_beyond(size, own) if draws else 0
        samples = self._find_samples(epoch, first, size, low, min(own + beyond, size))
        keys = derive(self.seed, number, samples[:own])
        # By numpy: torch's calls would take longer than a short batch.
        columns, lengths, tail = self._reader.read(epoch, samples.numpy())
        items, history = columns["item_id"], lengths - tail  # [events], [samples]
        offsets = np.cumsum(lengths) - lengths
        own_history, own_tail = (torch.from_numpy(each[:own]) for each in (history, tail))
        dense: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        candidates: dict[str, Nested] = {}
        events = list_ranges(offsets, history)  # of the histories
        before = events[: history[:own].sum()]
        sequences = {
            _NAMES[column]: Jagged(torch.from_numpy(columns[column][before]), own_history)
            for column in self._columns
        }
        sequences["timestamps"] = _note_span(sequences["timestamps"])
        if self.task == "ranking":
            after = list_ranges(offsets[:own] + history[:own], tail[:own])
            given = {name: torch.from_numpy(column[after]) for name, column in columns.items()}
            ones = torch.ones(len(after), dtype=torch.int64)
            candidates["candidates"] = Nested(given["item_id"], ones, own_tail)
            sequences["candidate_timestamps"] = Jagged(given["timestamp"], own_tail)
            labels = [given[task].to(torch.float32) for task in self.tasks]
            sequences["labels"] = Jagged(torch.stack(labels, dim=1), own_tail)
            weights = {task: own_tail.to(torch.float32) for task in self.tasks}
        elif training:
            following = torch.from_numpy(items[events + 1])
            sequences["targets"] = Jagged(following[: len(before)], own_history)
            weights = {"next_item": own_history.to(torch.float32)}
            targets = Jagged(following, torch.from_numpy(history))
            drawn = self._find_sampler().draw(number, keys, targets, low, size)
            sequences |= {name: Jagged(v, own_history) for name, v in drawn.sequences.items()}
            dense |= drawn.dense
            shared |= drawn.shared
        else:
            # a sample without target reads this 0
            padded = np.append(items, 0)
            place = np.where(tail > 0, offsets + history, len(items))
            dense["target"] = torch.from_numpy(padded[place])
            weights = {"next_item": own_tail.to(torch.float32)}
        return SequenceBatch(sequences, candidates, dense, weights, keys, number, shared)

    def _find_samples(self, epoch: int, first: int, size: int, low: int, count: int) -> Tensor:
        """Sample indices at `count` places from `low` on, round a global batch of `size` samples
        that begins at position `first` of the epoch."""
        wrapped = max(0, low + count - size)
        begin = first + low
        samples = self._order.samples(epoch, begin, begin + count - wrapped)
        if not wrapped:
            return samples
        return torch.cat([samples, self._order.samples(epoch, first, first + wrapped)])

    def _find_sampler(self) -> NegativeSampler:
        """Made when the first batch needs it: it may have to read the whole file. Workers get it
        with the source."""
        if self._sampler is None:
            self._sampler = self._build_sampler()
        return self._sampler

    def _build_sampler(self) -> NegativeSampler:
        per, count = self.negatives_per, self.negatives
        in_batch = round(count * self.in_batch_share)
        weights = popularity = log_q = None
        if self.any_ids:
            return NegativeSampler(per, count, count, self.halo, self.seed, None)
        if self.negatives_from == "popularity":
            weights = self.count_items().numpy() ** self.popularity_power
            if not weights.any():
                raise ValueError(
                    f"{self.file.path}: the train part holds no events to draw popular items "
                    f"from: {WANTED}"
                )
            popularity = AliasTable.of(weights)
        if self.log_q:
            weights = np.ones(self.num_items) if weights is None else weights
            catalogue, share = weights / weights.sum(), 0.0
            targets, empty = np.zeros(self.num_items), 0.0
            if in_batch and (per == "batch" or self.halo):
                share = in_batch / count
                targets, empty = self._reader.share_targets()
            log_q = mix_log_q(catalogue, targets, empty, share)
        return NegativeSampler(
            per,
            count,
            in_batch,
            self.halo,
            self.seed,
            self.num_items,
            popularity,
            log_q,
            self.negatives_from == "all",
        )

    def count_items(self) -> Tensor:
        """Counts how often each item occurs in the train part, whatever `part` this is. Reads the
        whole file.

        Returns:
            [num_items] int64.
        """
        return self._reader.count_items()

    def count_items_of(self, ids: Tensor) -> Tensor:
        """As `count_items`, of some ids.

        Args:
            ids: [n] different ones.

        Returns:
            [n] int64, on their device.
        """
        found = self._reader.count_items_of(ids.cpu().numpy())
        return torch.from_numpy(found).to(ids.device)


def _note_span(times: Jagged) -> Jagged:
    """The times of samples, each in order, with the longest between two of a sample."""
    values, lengths = times.values.numpy(), times.lengths.numpy()
    some = lengths > 0
    ends = np.cumsum(lengths)
    gaps = values[ends[some] - 1] - values[(ends - lengths)[some]]
    return replace(times, span=int(gaps.max()) if len(gaps) else 0)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
