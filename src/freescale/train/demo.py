"""The demonstration: generated histories with structure that a model can learn, and settings that train on them in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEMO_SETTINGS: dict[str, Any] = {
    "global_batch": 128,
    "epochs": 8,
    "max_length": 100,
    "width": 32,
    "negatives": 64,
    "lr": 3e-3,
    "row_lr": 3e-3,
    "log_every": 20,
    "eval_batch": 512,
    "placement": "item=sharded",
}


def demo_data(path: Path) -> Path:
    """A file of 4,000 users and 5,000 items, log-normal history lengths; made once."""
    from freescale.data.synthetic import generate

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        generate(temporary, users=4000, items=5000, median=30, sigma=0.8, cap=400, global_batch=128, collision=None, seed=1)
        temporary.replace(path)
    return path
