"""Flat tables, a row for each sample: which columns are features, and their batches."""
