"""Reads the events that samples need from a histories file, row group by row group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freescale.batch import Jagged, concat_ranges
from freescale.data.epoch_order import EpochOrder
from freescale.data.histories import HistoriesFile, RowGroup
from freescale.data.splits import Split


class WindowReader:
    """Reads the events of samples; keeps the row groups that it read last.

    Args:
        file: The histories.
        order: Of the samples in an epoch.
        split: Which events belong to a part.
        part: The part that is read.
        columns: List columns of the file.
        max_length: Of a history.
        tail: Events beyond the history, at most.
        kept_groups: Decoded row groups in memory, at most.
    """

    def __init__(
        self,
        file: HistoriesFile,
        order: EpochOrder,
        split: Split,
        part: str,
        columns: Sequence[str],
        *,
        max_length: int,
        tail: int,
        kept_groups: int,
    ) -> None:
        self._file, self._order, self._split = file, order, split
        self._part, self._max_length, self._tail = part, max_length, tail
        self._columns, self._kept_groups = tuple(columns), kept_groups
        # decoded, the least recently used first
        self.groups: OrderedDict[int, RowGroup] = OrderedDict()

    def read(self, epoch: int, samples: Tensor) -> tuple[dict[str, Jagged], Tensor]:
        """Reads the events that samples need.

        Args:
            epoch: In whose order row groups are read.
            samples: [n] numbers of samples in the file.

        Returns:
            The events by column, and [n]: how many at the end of each are beyond the history.
        """
        group_of = torch.searchsorted(self._order.starts, samples, right=True) - 1
        read_order = self._order.groups(epoch)
        place = torch.empty_like(read_order)
        place[read_order] = torch.arange(len(read_order))
        # group by group, in the epoch's order: each is read once
        turn = torch.argsort(place[group_of], stable=True)
        nothing = torch.empty(0, dtype=torch.int64)
        pieces = {name: [Jagged(_make_empty(name), nothing)] for name in self._columns}
        tails = [nothing]
        groups, sizes = torch.unique_consecutive(group_of[turn], return_counts=True)
        for number, members in zip(groups.tolist(), torch.split(turn, sizes.tolist()), strict=True):
            group = self._read_group(number)
            rows = (samples[members] - self._order.starts[number]).numpy()
            window = self._split.find_window(group, rows, self._part, self._max_length, self._tail)
            lengths = torch.from_numpy(window.end - window.begin)
            index = concat_ranges(torch.from_numpy(window.begin), lengths)
            for name in self._columns:
                values = torch.from_numpy(group.values[name])[index]
                pieces[name].append(Jagged(values.to(_make_empty(name).dtype), lengths))
            tails.append(torch.from_numpy(window.tail))
        back = torch.argsort(turn)
        columns = {name: Jagged.concat(parts).select(back) for name, parts in pieces.items()}
        return columns, torch.cat(tails)[back]

    def _read_group(self, number: int) -> RowGroup:
        if number not in self.groups:
            while len(self.groups) >= self._kept_groups:
                self.groups.popitem(last=False)
            self.groups[number] = self._file.read(number, self._columns)
        self.groups.move_to_end(number)
        return self.groups[number]

    def count_items(self) -> Tensor:
        """[num_items] int64: how often each item occurs in the train part. Reads the whole file."""
        counts = np.zeros(self._file.num_items, np.int64)
        for number in range(self._file.num_groups):
            group = self._file.read(number, ("item_id", "timestamp"))
            lengths = torch.from_numpy(self._split.find_ends(group, "train") - group.offsets[:-1])
            index = concat_ranges(torch.from_numpy(group.offsets[:-1]), lengths).numpy()
            np.add.at(counts, group.values["item_id"][index], 1)
        return torch.from_numpy(counts)


def _make_empty(column: str) -> Tensor:
    whole = column in ("item_id", "timestamp", "action")
    return torch.empty(0, dtype=torch.int64 if whole else torch.float32)
