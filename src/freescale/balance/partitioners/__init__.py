"""Partitioners: pure functions from a `Problem` to the rank of each sample, one file each.

A function is named like the value of `--balance` that selects it; `lookup` finds it by that name.
"""
