"""Sums of gradients by row, and of ranks' parts in order."""
