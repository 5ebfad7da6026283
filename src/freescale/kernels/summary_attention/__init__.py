"""Attention from rows to summaries of earlier segments."""
