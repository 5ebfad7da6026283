"""Rank slices of global batches, from a histories file.

Global batch n is the same set of samples in the same order for every number of ranks; a rank reads
its slice (and, for in-batch negatives, a few samples beyond it). Every batch is a pure function of
the file, the options and n: to resume is to start at another n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.data.batches.epoch_order import EpochOrder
from freescale.data.batches.global_batches import GlobalBatches
from freescale.data.batches.item_features import join_items
from freescale.data.batches.negatives import NegativeSampler, build_sampler, resolve_negatives
from freescale.data.batches.specs import (
    Features,
    NegativeSpec,
    ReadSpec,
    SampleSpec,
    SplitSpec,
)
from freescale.data.batches.time_order import SUPERVISED, TimeOrder, TimeReader, TimeSpec
from freescale.data.batches.windows import (
    EventReader,
    WindowReader,
    find_last_time,
    find_new_samples,
)
from freescale.data.histories import HistoriesFile
from freescale.data.labels import check_labels
from freescale.data.ranges import list_ranges
from freescale.data.store.event_store import EventStore
from freescale.data.store.window_index import WindowIndex
from freescale.random import derive

# The columns of a file and what a batch calls them.
_Ints = NDArray[np.int64]
_NAMES = {"item_id": "history", "timestamp": "timestamps", "action": "actions"}


class Histories(GlobalBatches):
    """Iterable of one rank's batches: the batches [start, stop) of the run.

    A sample is one user, or with a `TimeSpec` some events of a user in a window, which is an epoch.
    The events of a user by part:

    | split         | train            | validation: history, target | test: history, target |
    |---------------|------------------|-----------------------------|-----------------------|
    | leave-one-out | all but last two | [:-2], [-2]                 | [:-1], [-1]           |
    | time          | [:c-1]           | [:c-1], [c-1]               | [:c], [c]             |
    | none          | all              |                             |                       |

    where c is the number of events before the split time.

    A sample without history or target stays in its place, with empty sequences and weight 0. With
    `SplitSpec.since`, users without a later event are not visited, and `target_weights` of
    retrieval leave the earlier targets out.

    | task, part       | sequences                               | other columns                  |
    |------------------|-----------------------------------------|--------------------------------|
    | retrieval, train | history, timestamps, [actions], targets | negatives                      |
    | retrieval, else  | history, timestamps, [actions]          | dense target [n]               |
    | ranking          | history, timestamps, [actions],         | candidates                     |
    |                  | candidate_timestamps, labels [., tasks] |                                |

    In order of time, targets and candidates are the events of the sample's window. The history of
    ranking ends before the time of the first candidate; `target_weights` of retrieval leave out the
    targets before the window, and the target of its evaluation is the user's first one there.

    Negatives of a sample are in `dense` [n, negatives], those of a position in `sequences`
    [tokens, negatives], those of the batch in `shared` [negatives]. With log-q, their
    log-probabilities are `negatives_log_q` in the same place, those of the targets `targets_log_q`
    in `sequences`.

    Targets are the next item of each event. Candidates of ranking are the last events of the train
    part, up to `SampleSpec.candidates` (fewer if the history would be empty otherwise). For the
    test part of a split by time they are the target and the events after it, up to as many; else
    the target alone.

    ```python
    Histories(
        "histories.parquet",
        512,
        sample=SampleSpec(max_length=50),
        split=SplitSpec("leave-one-out", part="validation"),
        read=ReadSpec(shuffle=False),
    )
    ```

    Not thread-safe: it keeps the row groups that it read last.

    Args:
        path: A histories file, as `prepare` and `generate` write it.
        global_batch: Samples of a batch over all ranks.
        rank: This rank.
        world: Number of ranks.
        sample: What a sample holds.
        split: How histories are split, and which part is read.
        negatives: Which items the targets compete with. The attribute has every automatic choice
            made.
        read: Order, memory, epochs, and the ids of the items.
        features: Of items and events. None: there are none.
        time: Samples in order of time, from an event store of the file. The split is `windows`.

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
        sample: SampleSpec | None = None,
        split: SplitSpec | None = None,
        negatives: NegativeSpec | None = None,
        read: ReadSpec | None = None,
        features: Features | None = None,
        time: TimeSpec | None = None,
    ):
        super().__init__(global_batch, rank, world, read or ReadSpec())
        self.features, self.time = features, time
        self.sample, self.split = sample or SampleSpec(), split or SplitSpec()
        self.file = HistoriesFile(path, self.read.num_items, self.read.any_ids)
        self.file.num_items = max(self.file.num_items, self.read.least_items)
        self._is_ranking = self.sample.task == "ranking"
        self._has_negatives = self.split.part == "train" and not self._is_ranking
        self.negatives = resolve_negatives(
            negatives or NegativeSpec(),
            self.file,
            self.sample.max_length,
            self._has_negatives,
        )
        self._sampler: NegativeSampler | None = None
        self._check_tasks()
        present = self.file.columns
        self._columns = ("item_id", "timestamp", *(["action"] if "action" in present else []))
        self._event_columns = () if features is None else features.event_columns
        # samples of an epoch; None: all
        self._chosen: Tensor | None = None
        if self.split.since is not None:
            self._chosen = torch.from_numpy(find_new_samples(self.file, self.split))
        self._open_reader()
        self._seek(self.read.start)

    def _open_reader(self) -> None:
        labels = self.sample.tasks if self._is_ranking else ()
        columns = tuple(dict.fromkeys([*self._columns, *labels, *self._event_columns]))
        self._order: EpochOrder | TimeOrder
        self._reader: EventReader
        if self.time is not None:
            self._open_time_order(self.time, columns)
            return
        self._order = EpochOrder(torch.from_numpy(self.file.starts), self.read, self._chosen)
        is_long = self._is_ranking and self.split.part != "validation"
        self._reader = WindowReader(
            self.file,
            self._order,
            self.split,
            columns,
            self.read,
            max_length=self.sample.max_length,
            tail=self.sample.candidates if is_long else 1,
        )

    def _open_time_order(self, time: TimeSpec, columns: tuple[str, ...]) -> None:
        time.check(self.file, self._is_ranking)
        store = EventStore(time.store)
        index = WindowIndex(store, time.make_rule(self.sample))
        # An evaluation of retrieval has one target of each user, as other splits have.
        is_short = not self._is_ranking and self.split.part != "train"
        order = self._order = TimeOrder(index, time, is_short)
        self._sizes, self.windows = order.sizes, order.windows
        if self.split.part == "train" and not order.windows and not time.follows:
            raise ValueError(
                f"{self.file.path}: no sample in the windows that are trained ({time.describe()}): "
                "choose other windows, or other candidates"
            )
        self._reader = TimeReader(self.file, store, order, time, self.split, self.sample, columns)

    def open_window(self, number: int, first: int) -> None:
        """Goes on to a window of a stream, whose batches are numbered from `first` on."""
        assert self.time is not None and self.time.follows
        self.time, self.first = replace(self.time, windows=range(number, number + 1)), first
        for name in ("_firsts", "last_time"):
            vars(self).pop(name, None)
        self._sampler = None
        if self.features is not None:
            self.features.refresh()
        self._open_reader()
        self._seek(first)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without cached data."""
        return {k: v for k, v in vars(self).items() if k not in ("_order", "_reader")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._open_reader()

    def _check_tasks(self) -> None:
        if not self._is_ranking:
            return
        tasks = self.sample.tasks
        labels = [name for name in self.file.columns if name not in ("item_id", "timestamp")]
        missing = [name for name in tasks if name not in labels]
        if missing or not tasks:
            why = "is read for ranking, and no label is named"
            if missing:
                why = f"has no label column {', '.join(map(repr, missing))}"
            raise ValueError(
                f"{self.file.path} {why}; it has {', '.join(map(repr, labels)) or 'none'}: name "
                "labels that it has"
            )
        check_labels(self.file, tasks)

    @property
    def num_items(self) -> int:
        return self.file.num_items

    @property
    def any_ids(self) -> bool:
        """Whether items are arbitrary 64-bit ids."""
        return self.file.any_ids

    @property
    def num_actions(self) -> int:
        """Largest action plus one; 0 without actions."""
        has_actions = "action" in self.file.columns
        return max(1, self.file.find_largest("action") + 1) if has_actions else 0

    @property
    def num_samples(self) -> int:
        if self._sizes is not None:
            return sum(self._sizes)
        return self.file.num_samples if self._chosen is None else len(self._chosen)

    @cached_property
    def last_time(self) -> int | None:
        """The time of the last event that is trained on; None without any."""
        if self.time is not None:
            return self.time.windows.stop * self.time.window - 1
        return find_last_time(self.file, replace(self.split, part="train"))

    @property
    def fingerprints(self) -> dict[str, str]:
        found = {"fingerprint": self.file.fingerprint}
        found |= {} if self.split.since is None else {"since": str(self.split.since)}
        found |= {} if self.time is None else {"windows": self.time.describe()}
        return found | ({} if self.features is None else {"features": self.features.fingerprint})

    def batch(self, number: int) -> SequenceBatch:
        """This rank's slice of global batch `number`, counted over the whole run."""
        epoch, first, size, low, high = self._find_slice(number)
        own = high - low
        # The slice, then the samples after it (cyclically) for its in-batch negatives.
        beyond = self._get_sampler().count_beyond(size, own) if self._has_negatives else 0
        samples = self._find_samples(epoch, first, size, low, min(own + beyond, size))
        keys = derive(self.read.seed, number, samples[:own])
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
        sequences["timestamps"] = _measure_span(sequences["timestamps"])

        def describe(places: _Ints, context: bool = False, owners: _Ints | None = None) -> Tensor:
            assert self.features is not None
            known = ("item_id", "timestamp") if owners is not None else ()
            found = {name: columns[name][places] for name in (*self._event_columns, *known)}
            return self.features.find_events(found, context=context, samples=owners)

        rows, has_context = samples[:own].numpy(), False
        if self.features is not None:
            rows, has_context = self._reader.find_rows(epoch, rows), self.features.context_rows > 0
        if self.features is not None and self.features.event_rows:
            sequences["event_features"] = Jagged(describe(before), own_history)
        if self._is_ranking:
            after = list_ranges(offsets[:own] + history[:own], tail[:own])
            given = {name: torch.from_numpy(column[after]) for name, column in columns.items()}
            ones = torch.ones(len(after), dtype=torch.int64)
            candidates["candidates"] = Nested(given["item_id"], ones, own_tail)
            sequences["candidate_timestamps"] = Jagged(given["timestamp"], own_tail)
            if has_context:
                owners = np.repeat(rows, tail[:own])
                sequences["context_features"] = Jagged(describe(after, True, owners), own_tail)
            labels = [given[task].to(torch.float32) for task in self.sample.tasks]
            sequences["labels"] = Jagged(torch.stack(labels, dim=1), own_tail)
            weights = {task: own_tail.to(torch.float32) for task in self.sample.tasks}
        elif self._has_negatives:
            following = torch.from_numpy(items[events + 1])
            sequences["targets"] = Jagged(following[: len(before)], own_history)
            weights = {"next_item": own_history.to(torch.float32)}
            if self.split.since is not None or self.time is not None:
                late = torch.from_numpy(self._find_supervised(columns, before + 1))
                sequences["target_weights"] = Jagged(late.to(torch.float32), own_history)
                weights["next_item"] = _sum_samples(late, own_history)
            if has_context:  # the context of the event that a position predicts
                sequences["context_features"] = Jagged(describe(before + 1, True), own_history)
            targets = Jagged(following, torch.from_numpy(history))
            drawn = self._get_sampler().draw(number, keys, targets, low, size)
            sequences |= {name: Jagged(v, own_history) for name, v in drawn.sequences.items()}
            dense |= drawn.dense
            shared |= drawn.shared
        else:
            # a sample without target reads this 0
            place = np.where(tail > 0, offsets + history, len(items))
            dense["target"] = torch.from_numpy(np.append(items, 0)[place])
            if has_context:
                codes = describe(place[tail > 0], True)
                requests = codes.new_zeros(len(tail), codes.shape[1])
                requests[torch.from_numpy(tail > 0)] = codes
                dense["context_features"] = requests
            weights = {"next_item": own_tail.to(torch.float32)}
        if self.features is not None and self.features.user_rows:
            dense["user_features"] = self.features.find_users(rows)
        batch = SequenceBatch(sequences, candidates, dense, weights, keys, number, shared)
        if self.features is None or not self.features.item_rows:
            return batch
        return self._add_item_features(batch)

    def _add_item_features(self, batch: SequenceBatch) -> SequenceBatch:
        store = self.features
        assert store is not None
        training = batch.number if self.split.part == "train" else None

        def find(ids: Tensor) -> dict[str, Tensor]:
            codes, own = store.find_items(ids, training)
            found = {"features": codes, "own": own}
            return found | ({"vectors": store.find_vectors(ids)} if store.vector_widths else {})

        return join_items(batch, find)

    def _find_supervised(
        self, columns: Mapping[str, NDArray[Any]], events: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether events are targets that count."""
        if self.time is not None:
            return columns[SUPERVISED][events]
        return np.asarray(columns["timestamp"][events] > self.split.since)

    def _find_samples(self, epoch: int, first: int, size: int, low: int, count: int) -> Tensor:
        """`count` sample indices from place `low` on, cyclically within a global batch of `size`
        samples that begins at position `first` of the epoch."""
        wrapped = max(0, low + count - size)
        begin = first + low
        samples = self._order.samples(epoch, begin, begin + count - wrapped)
        if not wrapped:
            return samples
        return torch.cat([samples, self._order.samples(epoch, first, first + wrapped)])

    def find_rows(self) -> NDArray[np.int64] | None:
        """[samples] the row of each sample of the first epoch in the histories file; None: they are
        in the order of the file."""
        if self.time is None:
            return None
        return self._reader.find_rows(0, self._order.samples(0, 0, self.num_samples).numpy())

    def _get_sampler(self) -> NegativeSampler:
        """Built for the first batch, since it may read the whole file. Workers get it with the
        source."""
        if self._sampler is None:
            self._sampler = build_sampler(self.negatives, self.file, self._reader, self.read.seed)
        return self._sampler

    def count_items(self) -> Tensor:
        """[num_items] int64: how often each item occurs in the train part, whatever part this is.
        Reads the whole file."""
        return self._reader.count_items()

    def count_items_of(self, ids: Tensor) -> Tensor:
        """As `count_items`, for distinct ids [n]: [n] int64 on their device."""
        found = self._reader.count_items_of(ids.cpu().numpy())
        return torch.from_numpy(found).to(ids.device)


def _sum_samples(values: Tensor, lengths: Tensor) -> Tensor:
    """Values [tokens] of samples of these lengths [n] -> their sums [n] float32, exact for
    counts."""
    sums = np.append(0, np.cumsum(values.numpy()))
    ends = np.cumsum(lengths.numpy())
    return torch.from_numpy((sums[ends] - sums[ends - lengths.numpy()]).astype(np.float32))


def _measure_span(times: Jagged) -> Jagged:
    """Sorted times per sample, with the longest span of a sample."""
    values, lengths = times.values.numpy(), times.lengths.numpy()
    some = lengths > 0
    ends = np.cumsum(lengths)
    gaps = values[ends[some] - 1] - values[(ends - lengths)[some]]
    return replace(times, span=int(gaps.max()) if len(gaps) else 0)
