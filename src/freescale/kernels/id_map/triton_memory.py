"""The map from ids to rows of a dynamic table, on the device that holds the rows, and the memory in
which it decides about a batch.

Ids belong to virtual shards of `rows` entries each, one shard after the other; an entry is a row of
the table. The upper bits of a key (embedding/layout.py) are its shard.

For the host an allocation takes as long as a launch, and so do two views of a tensor. So parts with
the same lifetime share one tensor, and the kernels find them: in `split_noted`, `split_scratch`
(triton_kernels.py) and `split_choices` (triton_missing_kernels.py). Each part begins at a multiple
of 128 bytes.

    noted      entries [padded] int64; last uses, counts [padded] int32; ids [padded] int64, if they
               change. Swapped with the map, now and when the batch is undone.
    scratch    int32: HEAD words, among them the number of keys without an entry; missing ids of
               shards [shards]; claims of keys [2 padded], later the missing ids, then those with a
               new entry; places of keys without an entry [padded]. The first kernel clears the
               parts that must be 0: another launch before it would let the device wait.
    choices    int64: starts and targets of shards [shards]; ids placed and evicted by shards
               [shards] int32; missing ids in order [padded]; their numbers, and the rows chosen for
               them [padded] int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.kernels.jit.launch import count_blocks

HEAD = 32  # words
ZEROS = 1024  # words
EMPTY = -1  # `last` of an entry without an id


def pad(n: int) -> int:
    """The items of a part, a multiple of 16 bytes: Triton compiles other kernels otherwise."""
    return count_blocks(n, 32) * 32


@dataclass(frozen=True)
class Noted:
    """Entries, each once, and the values to swap with them: those that change their id, or in two
    rows those that a batch used; -1 is none."""

    memory: Tensor  # [3, padded] int64
    n: int

    @property
    def padded(self) -> int:
        return self.memory.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.memory]

    @property
    def entries(self) -> Tensor:
        return self.memory.as_strided((self.n,), (1,))  # the first row, in one call

    @property
    def last(self) -> Tensor:
        return self.memory[1].view(torch.int32)[: self.n]

    @property
    def count(self) -> Tensor:
        return self.memory[1].view(torch.int32)[self.padded : self.padded + self.n]

    @property
    def ids(self) -> Tensor:
        return self.memory[2, : self.n]


def allocate_noted(n: int, rows: int, device: torch.device) -> Noted:
    return Noted(torch.empty(rows, pad(n), dtype=torch.int64, device=device), n)


class Zeros:
    """Words of device memory that are 0, one for each batch."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(ZEROS, dtype=torch.int32, device=device)
        self._taken = 0

    def take(self) -> int:
        """The number of an unused word: work with it is after all work with earlier ones."""
        if self._taken == self.words.numel():
            self.words.zero_()
            self._taken = 0
        self._taken += 1
        return self._taken - 1


@dataclass(frozen=True)
class IdMap:
    """The ids of some virtual shards."""

    shards: int
    rows: int  # of a shard
    first_shard: int
    bits: int  # of a hash, below its shard
    # The next three share the 16 bytes of an entry: one sector has them all.
    ids: Tensor  # [shards * rows] int64, every second one of its memory
    last: Tensor  # [shards * rows] int32, batch of the last use; EMPTY: no id
    count: Tensor  # [shards * rows] int32, batches that used it
    words: Tensor  # [shards, buckets, 8] int32: the buckets
    zeros: Zeros

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.ids, self.last, self.count, self.words))


@dataclass(frozen=True)
class LookedUp:
    """The keys of a batch in the map."""

    found: Tensor  # [n] int64, a tensor of its own
    uses: Noted
    scratch: Tensor
    number: int  # of the word that counts the keys without an entry


def allocate_scratch(n: int, shards: int, device: torch.device, *, zero: bool) -> Tensor:
    allocate = torch.zeros if zero else torch.empty
    return allocate(HEAD + pad(shards) + 3 * pad(n), dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Missing:
    """Ids without a row, each once, by shard; ascending in a shard after `order`."""

    ids: Tensor  # [n] int64; undefined behind the last one
    wanted: Tensor  # [shards] int32: the number of ids of each shard
    starts: Tensor  # [shards] int64: the place of its first id
    counts: Tensor | None = None  # [n] int32: batches in which they occurred; None: this one


@dataclass(frozen=True)
class Listed:
    """Ids without a row, each once, in any order in a shard; not collected yet while `keys` are
    given."""

    n: int  # at most
    shards: int
    scratch: Tensor
    choices: Tensor
    keys: Tensor | None  # [n]
    counts: Tensor | None = None
    is_ordered: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes, as kernel arguments."""
        return pad(self.shards), pad(self.n)

    @property
    def wanted(self) -> Tensor:
        return self.scratch[HEAD : HEAD + self.shards]

    @property
    def starts(self) -> Tensor:
        return self.choices[: self.shards]

    @property
    def ids(self) -> Tensor:
        """In any order; after their last read, free memory."""
        begin = HEAD + pad(self.shards)
        return self.scratch[begin : begin + 2 * pad(self.n)].view(torch.int64)

    @property
    def ordered(self) -> Tensor:
        begin = 3 * pad(self.shards)
        return self.choices[begin : begin + pad(self.n)]


def allocate_choices(n: int, shards: int, device: torch.device) -> Tensor:
    return torch.empty(3 * pad(shards) + 2 * pad(n), dtype=torch.int64, device=device)
