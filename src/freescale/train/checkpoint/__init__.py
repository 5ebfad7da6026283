"""Checkpoints with torch.distributed.checkpoint: independent of ranks and placement, atomic, free
of pickled code.

A checkpoint is a folder `step-00000100` with torch's sharded tensor files and `state.json`. It is
written under a temporary name and renamed when every rank has finished, so that a killed save never
spoils an earlier one. Tables are stored whole in spread order (embedding/layout.py), dense
parameters and optimizer state by parameter name. Between full checkpoints there may be deltas,
which hold of the tables only the rows that changed (delta.py, chain.py).
"""

from freescale.train.checkpoint.chain import Intact, last_intact, verify_checkpoint
from freescale.train.checkpoint.checkpoints import Checkpoints
from freescale.train.checkpoint.errors import explain_errors
from freescale.train.checkpoint.files import Damaged
from freescale.train.checkpoint.find import find_checkpoint
from freescale.train.checkpoint.finite_check import NotFinite
from freescale.train.checkpoint.safe_reader import SafeReader

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
