"""Snapshots: the state of every rank in memory that outlives its process.

holder.py       the process that holds the memory files, one per machine and run
holder_link.py  how ranks and launchers reach it
segment.py      a memory file: named tensors, plain JSON, checksums
state_file.py   a memory file with a whole state, brought up to date in place
chain.py        at a buddy: a whole state and the changes that follow it; both made one again
contents.py     what a rank has to put into one
choice.py       who keeps a copy for whom, and which state a restart takes: pure functions
pace.py         how often
exchange.py     files between ranks
loading.py      a chain into a model
snapshots.py    all of it, for the training loop
"""
