"""The events of users in order of time, for random access: segments of columns on disk, and the
samples of each window of time."""
