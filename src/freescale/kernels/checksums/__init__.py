"""Checksums of host memory whose rows are replaced."""
