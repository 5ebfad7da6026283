"""Requests for rows: deduplication, collisions, division into parts."""
