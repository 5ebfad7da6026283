"""Rows that move: exchanged, inserted, copied by their numbers."""
