"""Marks of the rows that have changed."""
