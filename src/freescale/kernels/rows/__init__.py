"""Rows of a table: gather, read, sum duplicates."""
