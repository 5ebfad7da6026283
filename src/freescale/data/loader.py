"""Rank slices of global batches, from a histories file.

Global batch n is the same set of samples in the same order for every number of ranks; a rank reads
its slice (and, for in-batch negatives, a few samples beyond it). Every batch is a pure function of
the file, the options and n: to resume is to start at another n.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freescale.batch import Jagged, Nested, SequenceBatch, concat_ranges
from freescale.config import DataConfig, ModelConfig, TrainConfig
from freescale.data.histories import Group, HistoriesFile
from freescale.data.labels import check_labels
from freescale.data.negatives import draw_negatives
from freescale.data.order import EpochOrder
from freescale.random import derive

PARTS, SPLITS, TASKS = (
    ("train", "validation", "test"),
    ("leave-one-out", "time", "none"),
    ("retrieval", "ranking"),
)


class Histories:
    """Iterable of one rank's batches: the batches [start, epochs * batches_per_epoch) of the run.

    A sample is one user. Of its events the part takes:

    | split         | train            | validation: history, target | test: history, target             |
    |---------------|------------------|-----------------------------|-----------------------------------|
    | leave-one-out | all but last two | [:-2], [-2]                 | [:-1], [-1]                       |
    | time          | [:c-1]           | [:c-1], [c-1]               | [:c], [c]; c = events before time |
    | none          | all              |                             |                                   |

    A sample without history or target stays in its place, with empty sequences and weight 0.
    retrieval, train: sequences history, timestamps, [actions], targets (the next item of each);
    dense negatives. retrieval, else: the same without targets and negatives; dense target.
    ranking: history as above; candidates (train: the last `candidates` events of the part, fewer
    where the history would be empty; else the target), sequences candidate_timestamps and labels
    [candidates, tasks]. Not for two threads at once: it keeps the row groups that it read last.
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
        negatives: int = DataConfig.negatives,
        in_batch_share: float = DataConfig.in_batch_share,
        halo: int = 16,
        candidates: int = DataConfig.candidates,
        seed: int = TrainConfig.seed,
        shuffle: bool = DataConfig.shuffle,
        shuffle_groups: int = 8,
        epochs: int = 1,
        start: int = 0,
        num_items: int | None = DataConfig.num_items,
    ):
        _choose("task", task, TASKS)
        _choose("part", part, PARTS)
        _choose("split", split, SPLITS)
        for name, value, least in (
            ("global_batch", global_batch, 1),
            ("world", world, 1),
            ("max_length", max_length, 1),
            ("negatives", negatives, 0),
            ("halo", halo, 0),
            ("candidates", candidates, 1),
            ("shuffle_groups", shuffle_groups, 1),
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
        self.file = HistoriesFile(path, num_items)
        self.global_batch = global_batch
        self.rank = rank
        self.world = world
        self.max_length = max_length
        self.task = task
        self.tasks = tuple(tasks)
        self.part = part
        self.split = split
        self.split_time = split_time
        self.negatives, self.halo, self.candidates = negatives, halo, candidates
        self._in_batch = round(negatives * in_batch_share)
        self.seed = seed
        self.shuffle = shuffle
        self.shuffle_groups = shuffle_groups
        self.epochs = epochs
        self._check_tasks()
        present = self.file.columns
        self._columns = ("item_id", "timestamp", *(["action"] if "action" in present else []))
        self._read_columns = tuple(
            dict.fromkeys([*self._columns, *(self.tasks if task == "ranking" else ())])
        )
        starts = torch.from_numpy(self.file.starts)
        self._order = EpochOrder(starts, seed=seed, shuffle=shuffle, window=shuffle_groups)
        # decoded, the least recently used first
        self._groups: OrderedDict[int, Group] = OrderedDict()
        self._seek(start)

    def _check_tasks(self) -> None:
        if self.task != "ranking":
            return
        labels = [name for name in self.file.columns if name not in ("item_id", "timestamp")]
        missing = [name for name in self.tasks if name not in labels]
        if missing or not self.tasks:
            raise ValueError(
                f"{self.file.path}: label columns {', '.join(map(repr, missing)) or 'not named'}; "
                f"the file has {', '.join(map(repr, labels)) or 'none'}; name some of these as "
                "tasks"
            )
        check_labels(self.file, self.tasks)

    def _seek(self, start: int) -> None:
        total = self.epochs * self.batches_per_epoch
        if not 0 <= start <= total:
            raise ValueError(
                f"start is {start}; the run has {total} batches, so it must be in [0, {total}]"
            )
        self.start = self.position = start

    @property
    def num_items(self) -> int:
        return self.file.num_items

    @property
    def num_actions(self) -> int:
        """Largest action plus one; 0 without actions."""
        return self.file.largest("action") + 1 if "action" in self.file.columns else 0

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

    def __len__(self) -> int:
        """How many batches an iteration yields: those from `start` to the end of the last epoch."""
        return self.epochs * self.batches_per_epoch - self.start

    def __iter__(self) -> Iterator[SequenceBatch]:
        for number in range(self.start, self.epochs * self.batches_per_epoch):
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
        beyond = min(self.halo, size - 1) if draws and self._in_batch and own else 0
        places = torch.arange(low, low + min(own + beyond, size)) % size
        samples = self._order.samples(epoch, first, first + size)[places]
        columns, tail = self._windows(epoch, samples)
        items = columns["item_id"]
        offsets, history = items.offsets[:-1], items.lengths - tail  # [samples] each
        keys = derive(self.seed, number, samples[:own])
        dense: dict[str, Tensor] = {}
        candidates: dict[str, Nested] = {}
        own_history, own_tail = history[:own], tail[:own]
        before = concat_ranges(offsets[:own], own_history)
        names = {"item_id": "history", "timestamp": "timestamps", "action": "actions"}
        sequences = {
            names[c]: Jagged(columns[c].values[before], own_history) for c in self._columns
        }
        if self.task == "ranking":
            after = concat_ranges(offsets[:own] + own_history, own_tail)
            candidates["candidates"] = Nested(items.values[after], torch.ones_like(after), own_tail)
            sequences["candidate_timestamps"] = Jagged(columns["timestamp"].values[after], own_tail)
            labels = torch.stack(
                [columns[t].values[after].to(torch.float32) for t in self.tasks], dim=1
            )
            sequences["labels"] = Jagged(labels, own_tail)
            weights = {t: own_tail.to(torch.float32) for t in self.tasks}
        elif training:
            targets = Jagged(items.values[concat_ranges(offsets + 1, history)], history)
            sequences["targets"] = targets.slice(0, own)
            weights = {"next_item": own_history.to(torch.float32)}
            dense["negatives"] = draw_negatives(
                keys,
                targets,
                count=self.negatives,
                in_batch=self._in_batch,
                halo=self.halo,
                batch_size=size,
                num_items=self.num_items,
            )
        else:
            # a sample without target reads this 0
            padded = torch.cat([items.values, items.values.new_zeros(1)])
            place = torch.where(tail > 0, offsets + history, items.values.numel())
            dense["target"] = padded[place]
            weights = {"next_item": tail.to(torch.float32)}
        return SequenceBatch(sequences, candidates, dense, weights, keys, number)

    def _windows(self, epoch: int, samples: Tensor) -> tuple[dict[str, Jagged], Tensor]:
        """The events that the samples need, by column, and how many at the end of each are beyond
        the history."""
        group_of = torch.searchsorted(self._order.starts, samples, right=True) - 1
        read_order = self._order.groups(epoch)
        place = torch.empty_like(read_order)
        place[read_order] = torch.arange(len(read_order))
        # group by group, in the epoch's order: each is read once
        turn = torch.argsort(place[group_of], stable=True)
        pieces = {
            c: [Jagged(_empty(c), torch.empty(0, dtype=torch.int64))] for c in self._read_columns
        }
        tails = [torch.empty(0, dtype=torch.int64)]
        groups, sizes = torch.unique_consecutive(group_of[turn], return_counts=True)
        for number, members in zip(groups.tolist(), turn.split(sizes.tolist()), strict=True):
            group = self._decoded(number)
            begin, end, tail = self._bounds(
                group, (samples[members] - self._order.starts[number]).numpy()
            )
            index = concat_ranges(torch.from_numpy(begin), torch.from_numpy(end - begin))
            lengths = torch.from_numpy(end - begin)
            for name in self._read_columns:
                values = torch.from_numpy(group.values[name])[index]
                pieces[name].append(Jagged(values.to(_empty(name).dtype), lengths))
            tails.append(torch.from_numpy(tail))
        back = torch.argsort(turn)
        return {
            name: Jagged.concat(parts).select(back) for name, parts in pieces.items()
        }, torch.cat(tails)[back]

    def _part_ends(self, group: Group, part: str) -> np.ndarray:
        """[users]: where the part ends, its target included."""
        start, stop = group.offsets[:-1], group.offsets[1:]
        if self.split == "none":
            return stop
        if self.split == "leave-one-out":
            return np.maximum(stop - {"train": 2, "validation": 1, "test": 0}[part], start)
        earlier = np.concatenate([[0], np.cumsum(group.values["timestamp"] < self.split_time)])
        cut = start + earlier[stop] - earlier[start]  # first event at or after the split
        if part == "test":
            return np.where(cut < stop, cut + 1, start)
        return np.maximum(cut - (part == "train"), start)

    def _bounds(self, group: Group, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start, end = group.offsets[rows], self._part_ends(group, self.part)[rows]
        usable = end - start >= 2
        most = self.candidates if self.task == "ranking" and self.part == "train" else 1
        tail = np.where(usable, np.minimum(most, end - start - 1), 0)
        begin = np.where(usable, np.maximum(start, end - tail - self.max_length), end)
        return begin, end, tail

    def _decoded(self, number: int) -> Group:
        if number not in self._groups:
            while len(self._groups) > self.shuffle_groups + 1:
                self._groups.popitem(last=False)
            self._groups[number] = self.file.read(number, self._read_columns)
        self._groups.move_to_end(number)
        return self._groups[number]

    def item_counts(self) -> Tensor:
        """[num_items] int64: how often each item occurs in the train part, whatever `part` this is;
        reads all."""
        counts = np.zeros(self.num_items, np.int64)
        for number in range(self.file.num_groups):
            group = self.file.read(number, ("item_id", "timestamp"))
            lengths = torch.from_numpy(self._part_ends(group, "train") - group.offsets[:-1])
            index = concat_ranges(torch.from_numpy(group.offsets[:-1]), lengths).numpy()
            np.add.at(counts, group.values["item_id"][index], 1)
        return torch.from_numpy(counts)


def _empty(column: str) -> Tensor:
    whole = column in ("item_id", "timestamp", "action")
    return torch.empty(0, dtype=torch.int64 if whole else torch.float32)


def _choose(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
