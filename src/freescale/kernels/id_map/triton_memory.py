"""The memory that a batch of the map from id to row is decided with.

For the host an allocation is as long as a launch, and so are two views of a tensor. What is kept
for as long as something else is therefore one tensor with it, and kernels find its parts: in
`split_noted`, `split_scratch` (id_map_kernels.py) and `split_choices` (id_missing_kernels.py). Each
begins at a multiple of 128 bytes.

    noted      entries [padded] int64; last uses, counts [padded] int32; ids [padded] int64, if they
               change. What is swapped with the map, now and when the batch is taken back.
    scratch    int32: HEAD words, among them the number of keys without an entry; what shards want
               [shards]; claims of keys [2 padded], afterwards the missing ids, then those that
               have got an entry; places of keys without one [padded]. Where something has to be 0,
               the first kernel makes it so: until then the device would wait for the host.
    choices    int64: starts and targets of shards [shards]; what they have taken and evicted
               [shards] int32; missing ids in order [padded]; their numbers, and the rows that were
               chosen for them [padded] int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.kernels.jit.launch import count_blocks

HEAD = 32  # words
ZEROS = 1024  # words


def pad(n: int) -> int:
    """Items of a part: at other addresses than multiples of 16 bytes kernels are others."""
    return count_blocks(n, 32) * 32


@dataclass(frozen=True)
class Noted:
    """`reference.id_map.Contents` or, in two rows, `Uses`."""

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
        return self.memory.as_strided((self.n,), (1,))  # the first row: in one step

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
    """Words of a device's memory that are 0, one for each batch."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(ZEROS, dtype=torch.int32, device=device)
        self._taken = 0

    def take(self) -> int:
        """The number of one that nobody has had. Work that was given to the device with the words
        before is before that with this one."""
        if self._taken == self.words.numel():
            self.words.zero_()
            self._taken = 0
        self._taken += 1
        return self._taken - 1


@dataclass(frozen=True)
class LookedUp:
    """`reference.id_map.Lookup`."""

    found: Tensor  # [n] int64; nothing else is kept with it
    uses: Noted
    scratch: Tensor
    number: int  # of the word that says how many keys have no entry


def allocate_scratch(n: int, shards: int, device: torch.device, *, zero: bool) -> Tensor:
    allocate = torch.zeros if zero else torch.empty
    return allocate(HEAD + pad(shards) + 3 * pad(n), dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Listed:
    """`reference.id_map.Missing`, those of a shard in any order; or, while there are keys, not
    collected yet."""

    n: int  # at most
    shards: int
    scratch: Tensor
    choices: Tensor
    keys: Tensor | None  # [n]
    counts: Tensor | None = None
    is_ordered: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """As kernels take them."""
        return pad(self.shards), pad(self.n)

    @property
    def wanted(self) -> Tensor:
        return self.scratch[HEAD : HEAD + self.shards]

    @property
    def starts(self) -> Tensor:
        return self.choices[: self.shards]

    @property
    def ids(self) -> Tensor:
        """In any order; once nobody reads them, memory."""
        begin = HEAD + pad(self.shards)
        return self.scratch[begin : begin + 2 * pad(self.n)].view(torch.int64)

    @property
    def ordered(self) -> Tensor:
        begin = 3 * pad(self.shards)
        return self.choices[begin : begin + pad(self.n)]


def allocate_choices(n: int, shards: int, device: torch.device) -> Tensor:
    return torch.empty(3 * pad(shards) + 2 * pad(n), dtype=torch.int64, device=device)
