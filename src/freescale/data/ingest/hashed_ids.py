"""Ids of dynamic tables from anything: a number of 64 bits is its own id, any other text is hashed.

The id is a function of the text alone, on every machine and in every version, so that files of
different days agree and a service computes it without a vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.data.ingest.ids import NotIntegers, parse_integers
from freescale.data.values import cast_values, is_text

_NUMBER = re.compile(rb"0|-?[1-9][0-9]{0,18}")


def hash_ids(values: Iterable[str | bytes]) -> Tensor:
    """Ids of a dynamic table (`freescale.Dynamic`) from strings. A string that is a signed 64-bit
    number in its usual form ("7", not "07" or "+7"), is that number; any other is hashed
    to 64 bits: blake2b of its UTF-8 bytes with a digest of 8 bytes, the least significant first. Of
    a billion different strings, two share an id with a probability of 3 %.

    Args:
        values: for instance a column of a file.

    Returns:
        [n] int64.
    """
    return torch.from_numpy(_hash_texts(list(values)))


def _hash_texts(texts: Sequence[str | bytes]) -> NDArray[np.int64]:
    known = {text: _hash_text(text) for text in set(texts)}
    return np.frombuffer(b"".join(known[text] for text in texts), "<i8").astype(np.int64)


def _hash_text(text: str | bytes) -> bytes:
    """The id, least significant byte first."""
    raw = text.encode() if isinstance(text, str) else text
    if _NUMBER.fullmatch(raw) and -(1 << 63) <= (number := int(raw)) < 1 << 63:
        return number.to_bytes(8, "little", signed=True)
    return blake2b(raw, digest_size=8).digest()


class HashedIds:
    """Encodes a column block by block and finds different texts that share an id, with 12 bytes for
    each different id; with `keep`, also the texts that are no numbers."""

    def __init__(self, keep: bool = True) -> None:
        self._keep = keep
        # ids ascending, each with a second hash of its text; none is in two of these runs
        self._runs: list[tuple[NDArray[np.int64], NDArray[np.uint32]]] = []
        self._shared: set[tuple[int, int]] = set()  # ids and second hashes of further texts
        self._hashed = 0
        self.texts: list[tuple[pa.Array, pa.Array]] = []  # ids, and what was hashed to them

    @property
    def different(self) -> int:
        """Distinct texts and numbers so far."""
        return sum(len(ids) for ids, _ in self._runs) + len(self._shared)

    def encode(self, values: pa.Array) -> pa.Array:
        """Ids of a block's values. Raises BadValue for missing or invalid values."""
        try:
            numbers = parse_integers(values, signed=True)
        except NotIntegers:
            pass
        else:
            unique = np.unique(numbers.to_numpy())
            self._find_new(unique, unique.astype(np.uint32))
            return numbers
        text = values if is_text(values.type) else cast_values(values, pa.string(), "ids")
        encoded = text.dictionary_encode()  # the loop is over the different ids of the block
        texts = encoded.dictionary.to_pylist()
        ids = _hash_texts(texts)
        numeric = np.array([str(id) == each for id, each in zip(ids.tolist(), texts)], bool)
        second = np.array([crc32(each.encode()) for each in texts], np.uint32)
        new = self._find_new(ids, np.where(numeric, ids.astype(np.uint32), second)) & ~numeric
        self._hashed += int(new.sum())
        if self._keep and new.any():
            at = pa.array(np.flatnonzero(new))
            self.texts.append((pa.array(ids[new]), encoded.dictionary.take(at).cast(pa.string())))
        return pa.array(ids).take(encoded.indices)

    def _find_new(self, ids: NDArray[np.int64], second: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """[n] whether ids [n] of distinct texts are new; marks them as seen."""
        new, other = np.ones(len(ids), bool), np.zeros(len(ids), bool)
        for known, seconds in self._runs:
            places = np.searchsorted(known, ids).clip(max=len(known) - 1)
            found = known[places] == ids
            new &= ~found
            other |= found & (seconds[places] != second)
        order = np.flatnonzero(new)
        order = order[np.argsort(ids[order], kind="stable")]
        again = np.zeros(len(order), bool)
        again[1:] = ids[order[1:]] == ids[order[:-1]]  # within the block
        other[order[again]] = True
        for place in np.flatnonzero(other).tolist():
            pair = int(ids[place]), int(second[place])
            new[place] = pair not in self._shared
            self._shared.add(pair)
        order = order[~again]
        if len(order):
            self._add_run(ids[order], second[order])
        return new

    def _add_run(self, ids: NDArray[np.int64], second: NDArray[np.uint32]) -> None:
        """Merges runs of similar length, so that few remain."""
        self._runs.append((ids, second))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            (a, b), (c, d) = self._runs.pop(), self._runs.pop()
            merged = np.concatenate([a, c])
            order = np.argsort(merged, kind="stable")
            self._runs.append((merged[order], np.concatenate([b, d])[order]))

    def describe(self) -> str:
        """A summary for the user: how many ids, and whether texts share one."""
        if not self._hashed:
            return f"{self.different:,} integers"
        shared = "no two share an id"
        if self._shared:
            shared = f"{len(self._shared):,} of them share an id with another"
        hashed = f"{self._hashed:,} of them strings hashed to 64 bits"
        return f"{self.different:,} ids, {hashed}; {shared}"
