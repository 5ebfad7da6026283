"""Ids of a dynamic table that have no row yet and are counted (`Seen`), for a map on the device.
They are counted in host memory: only a batch's ids without a row travel there, and those that get a
row travel back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.embedding.dynamic.bindings import CHANGE, FIGURES, address, load_dynamic
from freescale.embedding.dynamic.directory import ShardArrays, describe_rules
from freescale.embedding.dynamic_rules import Dynamic
from freescale.kernels.id_map.reference import Missing
from freescale.kernels.upload import upload


@dataclass(frozen=True)
class Admitted:
    """What a batch has decided."""

    missing: Missing  # that get a row, on the device
    turned_away: int
    waiting: int
    forgotten: int
    log: NDArray[Any]  # of CHANGE: the other state of each counter, in the order of changes


class WaitingIds:
    """The counters of one rank's shards [first, last)."""

    def __init__(self, rules: Dynamic, shards: tuple[int, int]) -> None:
        """ValueError without a C compiler."""
        self._library = load_dynamic()
        self._rules, self._shards = rules, shards
        count = shards[1] - shards[0]
        self.counters = ShardArrays(count, rules.shard_counters, rules.shard_bits)

    def count(self, missing: Missing, room: Tensor, batch: int) -> Admitted:
        """Counts missing ids, as many of which as there is `room` [shards] for may be admitted.
        Waits for the device."""
        wanted, free = torch.stack([missing.wanted, room]).cpu().numpy()
        total, device = int(wanted.sum()), room.device
        ids = missing.ids[:total].cpu().numpy()
        admitted, counts = np.empty(total, np.int64), np.empty(total, np.int32)
        given, figures = np.zeros_like(wanted), np.zeros(len(FIGURES), np.int64)
        log = np.empty(2 * total, CHANGE)
        rules = describe_rules(self._rules, self._shards, batch)
        arrays = wanted, free, ids, log, admitted, counts, given, figures
        if self._library.count_missing(self.counters.struct, rules, *map(address, arrays)):
            raise MemoryError(f"counts of {total:,} ids need more memory than there is")
        found = dict(zip(FIGURES, figures.tolist(), strict=True))
        starts = np.cumsum(given, dtype=np.int64) - given
        return Admitted(
            Missing(
                upload(admitted[: found["inserted"]], device),
                upload(given, device),
                upload(starts, device),
                upload(counts[: found["inserted"]], device),
            ),
            found["turned_away"],
            found["waiting"],
            found["forgotten"],
            log[: found["changes"]].copy(),
        )

    def exchange(self, admitted: Admitted, back: bool) -> None:
        """To the state before the batch (back), or after it."""
        log = admitted.log
        self._library.exchange(None, self.counters.struct, log.size, address(log), back)

    def rebuild(self) -> None:
        """After counters were written."""
        self._library.rebuild(self.counters.struct)
