"""Checkpoints with torch.distributed.checkpoint: independent of ranks and placement, atomic, free
of pickled code.

A checkpoint is a folder `step-00000100` with torch's sharded tensor files and `state.json`. It is
written under a temporary name and renamed when every rank has finished, so that a killed save never
spoils an earlier one. Tables are stored whole in spread order (embedding/layout.py), dense
parameters and optimizer state by parameter name. Between full checkpoints there may be deltas,
which hold of the tables only the rows that changed (delta.py, chain.py).
"""

from freescale.train.state.chain import Intact, last_intact, verify_checkpoint
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.errors import explain_errors
from freescale.train.state.files import Damaged
from freescale.train.state.find import find_checkpoint
from freescale.train.state.finite_check import NotFinite
from freescale.train.state.safe_reader import SafeReader

__all__ = [
    "Checkpoints",
    "Damaged",
    "Intact",
    "NotFinite",
    "SafeReader",
    "explain_errors",
    "find_checkpoint",
    "last_intact",
    "verify_checkpoint",
]
