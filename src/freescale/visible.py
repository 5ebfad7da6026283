"""Semi-local attention (arXiv 2602.16986): which events an event sees, as pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Visible:
    """A position sees the first positions of its history and the last ones, itself among them.
    Candidates have the position after the history.

    Raises:
        ValueError: `first` is negative, or `last` is 0.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < 1:
            raise ValueError(
                "an event sees first=0 or more and last=1 or more (itself) positions, not "
                f"first={self.first}, last={self.last}"
            )

    @staticmethod
    def parse(text: str) -> Visible:
        """Reads `first=64,last=1024`, as of --attend."""
        parts = dict(part.strip().partition("=")[::2] for part in text.split(","))
        try:
            first, last = int(parts.pop("first", "0")), int(parts.pop("last"))
        except (KeyError, ValueError):
            parts["?"] = ""
            first, last = 0, 1
        if parts:
            raise ValueError(f"--attend {text}: give it as first=64,last=1024")
        return Visible(first, last)

    def hides(self, distance: Any, key: Any) -> Any:
        """Whether a query does not see keys so many positions before it; arrays or tensors."""
        return (distance >= self.last) & (key >= self.first)

    def with_prefix(self, count: int) -> Visible:
        """For histories behind so many tokens that all others see."""
        return Visible(self.first + count, self.last)

    def count_pairs(self, history: Any, candidates: Any = 0) -> Any:
        """Pairs of a query and a key that it sees, [n] float64, of samples with so many events and
        candidates (arrays)."""
        own, most = history * 1.0, self.first + self.last
        short = own - (own > most) * (own - most)
        beyond = own + 1 - (own >= most) * (own + 1 - most)
        return short * (short + 1) / 2 + (own - short) * most + candidates * beyond
