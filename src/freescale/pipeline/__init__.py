"""Schedules of a training step. `serial` overlaps nothing: it is the oracle of the others."""
