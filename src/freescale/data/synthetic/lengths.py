"""Lengths of synthetic histories: one distribution for generated files and for the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.random import derive, hash_name, uniform

SHORTEST = 2  # events of the shortest history


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths of histories, clipped to [SHORTEST, cap]."""

    ends: NDArray[np.float64]  # [cap + 1]: probability of a length of at most l

    @classmethod
    def from_options(
        cls, kind: str, median: float, sigma: float, exponent: float, cap: int
    ) -> LengthDistribution:
        """A `lognormal` (median, sigma of the logarithm) or `zipf` (exponent) distribution up to
        `cap`.

        Raises ValueError for an unknown kind, or a median that is not above 0.
        """
        length = np.arange(cap + 1, dtype=np.float64)
        if kind == "lognormal":
            if median <= 0:
                raise ValueError(f"median is {median}; it must be above 0")
            z = (np.log(length + 0.5) - np.log(median)) / max(sigma, 1e-12)
            ends = 0.5 * (1 + torch.erf(torch.from_numpy(z) / 2**0.5).numpy())
        elif kind == "zipf":
            mass = np.where(length >= SHORTEST, np.maximum(length, 1) ** -exponent, 0.0)
            ends = np.cumsum(mass) / mass.sum()
        else:
            raise ValueError(f"lengths is {kind!r}; choose lognormal or zipf")
        ends[:SHORTEST], ends[-1] = 0.0, 1.0
        return cls(ends)

    @property
    def mean(self) -> float:
        return float((1 - self.ends).sum())

    def draw(self, seed: int, users: torch.Tensor) -> NDArray[Any]:
        """Lengths [n] int64 for users [n] int64: a pure function of the seed and the user."""
        drawn = uniform(derive(seed, hash_name("length"), users)).numpy()
        return np.searchsorted(self.ends, drawn, "right").astype(np.int64)
