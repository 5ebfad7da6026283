"""Strings as ids of dynamic tables, without a vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


def hash_ids(values: Iterable[str | bytes]) -> Tensor:
    """Ids of a dynamic table (`freescale.Dynamic`) from strings: 64 bits of a hash that is the same
    in every process and version. Of a billion different strings, two share an id with a probability
    of 3 %.

    Args:
        values: for instance a column of a file.

    Returns:
        [n] int64.
    """
    known: dict[str | bytes, bytes] = {}
    digests = []
    for value in values:
        digest = known.get(value)
        if digest is None:
            text = value.encode() if isinstance(value, str) else value
            digest = known[value] = blake2b(text, digest_size=8).digest()
        digests.append(digest)
    return torch.from_numpy(np.frombuffer(b"".join(digests), "<i8").astype(np.int64))
