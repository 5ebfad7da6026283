"""Sums of ids' draws, for log-q of dynamic tables."""
