"""Optimizers that update the rows of a table."""
