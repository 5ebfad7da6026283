"""Model, batch, histories and targets of the train and short ladders."""

from __future__ import annotations

from typing import Any

_ROWS = {"row_optimizer": "rowwise_adagrad"}  # TorchRec has no Adam on CPUs
_TRIAL = {"negatives": 16, "placement": "sharded"}
# Shapes of the paper ladder: the paper's divided by 3 on a GPU, by 20 on CPU hosts.
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "file": {"users": 2560, "items": 4_000_000, "median": 1000.0, "cap": 7000},
        "settings": {"max_length": 7000, "width": 256, "layers": 5, "heads": 2},
        "batch": {"samples": 32},
    },
    "cpu": {
        "file": {"users": 2048, "items": 400_000, "median": 150.0, "cap": 1050},
        "settings": {"max_length": 1050, "width": 64, "layers": 1, "heads": 2, **_ROWS},
        "batch": {"samples": 16},
    },
    # Histories of a few events, as in shops: shows the cost of a step besides its compute.
    "short": {
        "file": {"users": 16384, "items": 340_000, "median": 6.0, "cap": 300},
        "settings": {"max_length": 300, "width": 256, "layers": 1, "heads": 2, **_ROWS},
        "batch": {"samples": 16},
    },
    "trial": {
        "file": {"users": 128, "items": 5_000, "median": 20.0, "cap": 80},
        "settings": {"max_length": 80, "width": 16, "layers": 1, "heads": 2, **_ROWS, **_TRIAL},
        "batch": {"samples": 4},
    },
}
# targets of samples/s over SparseDist's: by number of GPU ranks; on CPU hosts by shape
TARGETS = {4: 1.7, 8: 2.7}
HOST_TARGETS = {"short": 1.5}
# largest relative difference of first losses; GPUs compute in bf16
FIRST_LOSS = {"cuda": 1e-3, "cpu": 1e-5}
