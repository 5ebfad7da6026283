"""Chooses the version of an operation, a module per operation."""
