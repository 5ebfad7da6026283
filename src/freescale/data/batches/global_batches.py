"""Global batches counted over a run, and the position in it: what all sources of batches share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from freescale.batch import SequenceBatch
from freescale.data.batches.specs import ReadSpec, check_least


class GlobalBatches(ABC):
    """Iterable of one rank's batches: the batches [start, stop) of the run. Every epoch has all
    samples, or a number of its own (`_sizes`)."""

    _sizes: Sequence[int] | None = None  # samples of each epoch; None: all, in each
    first = 0  # number of the first batch

    def __init__(self, global_batch: int, rank: int, world: int, read: ReadSpec) -> None:
        check_least(1, global_batch=global_batch, world=world)
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank}; with {world} ranks it must be in [0, {world})")
        self.global_batch, self.rank, self.world, self.read = global_batch, rank, world, read

    @property
    @abstractmethod
    def num_samples(self) -> int: ...

    @property
    @abstractmethod
    def fingerprints(self) -> dict[str, str]:
        """Of what is read: a run resumes with the same."""

    @abstractmethod
    def batch(self, number: int) -> SequenceBatch:
        """This rank's slice of global batch `number`, counted over the whole run."""

    def _seek(self, start: int) -> None:
        total = self.stop
        if not 0 <= start <= total:
            raise ValueError(
                f"start is {start}; the run has {total} batches, so it must be in [0, {total}]"
            )
        self.start = self.position = start

    @cached_property
    def _firsts(self) -> list[int]:
        """[epochs + 1] the first batch of each epoch, if they differ in size."""
        counts = (-(-size // self.global_batch) for size in self._sizes or ())
        return list(accumulate(counts, initial=self.first))

    @property
    def batches_per_epoch(self) -> int:
        """Batches of each epoch, if they are of one size."""
        assert self._sizes is None
        return -(-self.num_samples // self.global_batch)

    def find_epoch(self, number: int) -> int:
        """The epoch of global batch `number`; for `stop`, the number of epochs."""
        if self._sizes is None:
            return number // self.batches_per_epoch
        return bisect_right(self._firsts, number) - 1

    def _find_first(self, number: int) -> tuple[int, int, int]:
        """The epoch of a global batch, the batch's first position in it, and the samples of the
        epoch."""
        epoch = self.find_epoch(number)
        if self._sizes is None:
            index, size = number % self.batches_per_epoch, self.num_samples
        else:
            index, size = number - self._firsts[epoch], self._sizes[epoch]
        return epoch, index * self.global_batch, size

    def batch_size(self, number: int) -> int:
        """Samples of global batch `number`: the last of an epoch may be smaller."""
        _, first, size = self._find_first(number)
        return min(self.global_batch, size - first)

    def _find_slice(self, number: int) -> tuple[int, int, int, int, int]:
        """Epoch, first position and size of a global batch; this rank's places [low, high) in
        it."""
        (epoch, first, _), size = self._find_first(number), self.batch_size(number)
        low, high = size * self.rank // self.world, size * (self.rank + 1) // self.world
        return epoch, first, size, low, high

    @property
    def stop(self) -> int:
        """One past the last batch of the last epoch."""
        if self._sizes is None:
            return self.read.epochs * self.batches_per_epoch
        return self._firsts[-1]

    def __len__(self) -> int:
        """Batches from `start` to the end of the last epoch."""
        return self.stop - self.start

    def __iter__(self) -> Iterator[SequenceBatch]:
        for number in range(self.start, self.stop):
            batch = self.batch(number)
            self.position = number + 1
            yield batch

    def state_dict(self, next: int | None = None) -> dict[str, Any]:
        """`next`: the batch to resume at, if not the one after the last yielded (prefetching runs
        ahead)."""
        return {
            "next": self.position if next is None else next,
            **self.fingerprints,
            "global_batch": self.global_batch,
            "seed": self.read.seed,
            "shuffle": self.read.shuffle,
            "shuffle_groups": self.read.shuffle_groups,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, ours in self.state_dict().items():
            if name != "next" and state.get(name) != ours:
                same = "data and options"
                if name == "features":
                    same = "--items, --users and --features, and leave --schema out: the run has it"
                raise ValueError(
                    f"the data position was saved with {name} {state.get(name)!r}, this run has "
                    f"{ours!r}; resume with the same {same}"
                )
        self._seek(state["next"])
