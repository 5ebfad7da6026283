"""The demonstration: generated histories with structure that a model can learn, and settings that train on them in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEMO_SETTINGS: dict[str, Any] = {
    "global_batch": 64,
    "epochs": 6,
    "max_length": 100,
    "width": 32,
    "negatives": 64,
    "dropout": 0.0,
    "lr": 1e-2,
    "row_lr": 1e-2,
    "log_every": 40,
    "device": "cpu",  # two processes on any machine, also one with a single GPU
    "eval_batch": 512,
    # The rule would replicate so small a table; sharded, the ledger has all kinds of traffic to show.
    "placement": "item=sharded",
}


def demo_data(path: Path) -> Path:
    """4,000 users, 1,000 items, log-normal history lengths; what comes next depends on what was last. Made once."""
    from freescale.data.synthetic import generate

    if not path.exists():
        generate(path, users=4000, items=1000, median=30, sigma=0.8, cap=400, popularity=0.5, global_batch=64, seed=1)
    return path
