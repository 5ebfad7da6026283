"""HSTU over histories that are cut into segments."""

from freescale.models.segments.memory import Memory, split_history
from freescale.models.segments.model import SegmentedHSTU

__all__ = ["Memory", "SegmentedHSTU", "split_history"]
