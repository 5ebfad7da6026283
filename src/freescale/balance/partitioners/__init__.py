"""Partitioners: pure functions from a `Problem` to the rank of each sample."""
