"""Global batches counted over a run, and the position in it: what all sources of batches share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from freescale.batch import SequenceBatch
from freescale.data.batches.specs import ReadSpec, check_least


class GlobalBatches(ABC):
    """Iterable of one rank's batches: the batches [start, epochs * batches_per_epoch) of the
    run."""

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

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch)

    def batch_size(self, number: int) -> int:
        """Samples of global batch `number`: the last of an epoch may be smaller."""
        return min(
            self.global_batch,
            self.num_samples - number % self.batches_per_epoch * self.global_batch,
        )

    def _find_slice(self, number: int) -> tuple[int, int, int, int, int]:
        """Epoch, first position and size of a global batch; this rank's places [low, high) in
        it."""
        (epoch, index), size = divmod(number, self.batches_per_epoch), self.batch_size(number)
        low, high = size * self.rank // self.world, size * (self.rank + 1) // self.world
        return epoch, index * self.global_batch, size, low, high

    @property
    def stop(self) -> int:
        """One past the last batch of the last epoch."""
        return self.read.epochs * self.batches_per_epoch

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
