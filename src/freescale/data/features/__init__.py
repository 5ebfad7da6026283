"""Features of items and events: read, fitted to the training part, joined into batches.

attributes.py   reads a file with a row per item
inference.py    which kind a column is, and what will be done with it
fitting.py      categories and buckets, by the training part; values become rows of a table
store.py        the rows of each item, memory-mapped; joins them into batches
prepare.py      all of it for a run, cached
"""
