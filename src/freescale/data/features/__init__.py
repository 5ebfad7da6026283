"""Features of items, users and events: read, fitted to the training part, joined into batches.

sources.py      the files, and which of their columns are features
attributes.py   reads a file with a row per item or user, and numbers these
inference.py    which kind a column is, and what will be done with it
fitting.py      categories and buckets, by the training part; values become rows of a table
crosses.py      crosses of a request and its candidate, of several sources
store.py        the rows of each item and user, memory-mapped; joins them into batches
prepare.py      all of it for a run, cached
"""
