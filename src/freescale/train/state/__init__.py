"""The state of a run, on disk and in memory: a checkpoint outlives the machines, a snapshot in
memory only the ranks. Both are restored the same way. On disk a full state is followed by deltas;
in memory every file is a whole state, updated in place.

contents.py       what a run's state is; model.py and packing.py: of its model and optimizer
restore.py        a state, from either store, back into what trains it
copies.py         copies of one moment, and the thread that saves them
disk.py           the folder of checkpoints: atomic publication, checksums, what stays
checkpoints.py    saves and loads; writing.py, intact.py, overview.py: writes, verifies, lists
memory.py         memory files with checksums, also sent; file_reads.py: read
holder.py         the process that holds them; holder_link.py: its clients
held.py           which snapshots there are, which one a restart uses, what expires
snapshots.py      takes snapshots; found.py: restores them; pace.py: how often

A checkpoint is a folder `step-00000100` with torch's sharded tensor files and `state.json`. Tables
are stored whole in spread order (embedding/layout.py), everything else by name: independent of
ranks and placement, and free of pickled code.
"""
