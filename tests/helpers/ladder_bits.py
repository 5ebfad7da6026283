"""Trains the ladder's arms of `freescale train` one after another on the ranks of torchrun, and
writes what rank 0 has gathered: losses, a hash of each rank's weights, and how they differ.

    torchrun --nproc-per-node 8 ladder_bits.py SHAPE DEVICE STEPS HISTORIES RESULT
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from freescale_bench.common.ranks import join
from freescale_bench.ladder.product import ProductArm, make_config

SERIAL = {"schedule": "serial", "transport": "collective"}
# Each arm and the one that it has to equal to the bit.
ARMS = {
    "serial, collective": ({**SERIAL, "dense_sums": "collective"}, None),
    "staged, collective": ({"dense_sums": "collective"}, "serial, collective"),
    "serial, partitioned": ({**SERIAL, "dense_sums": "partitioned"}, None),
    "staged, partitioned": ({"dense_sums": "partitioned"}, "serial, partitioned"),
}


def hash_weights(trainer) -> str:
    """Of this rank: its rows with the optimizer's state, and the dense weights."""
    trainer.pipeline.flush()
    tables = trainer.model.tables
    found = hashlib.sha256()
    for name in tables.specs:
        for value in tables.get_local_state(name).values():
            found.update(value.detach().contiguous().cpu().view(torch.uint8).numpy())
    for value in trainer.model.module.parameters():
        found.update(value.detach().contiguous().cpu().view(torch.uint8).numpy())
    return found.hexdigest()


def train_arm(shape: str, device: torch.device, steps: int, histories: Path, changes) -> dict:
    config = make_config(shape, int(os.environ["WORLD_SIZE"]), device.type, histories)
    unbalanced = {"balance": "none", "balance_adapt": False}
    config = replace(config, train=replace(config.train, steps=steps, **unbalanced, **changes))
    name = "-".join([config.train.schedule, config.train.dense_sums])
    arm = ProductArm(config, histories.parent / name, histories, device)
    losses = [arm.begin_step() for _ in range(steps)]
    found = {
        "losses": [float(loss) for loss in losses],
        "weights": hash_weights(arm.trainer),
        "options": arm.find_options(),
    }
    arm.quiet()
    return found


def main(shape: str, device: str, steps: int, histories: Path, result: Path) -> None:
    transport = join(device, 120.0)
    found = {}
    for name, (changes, _) in ARMS.items():
        found[name] = train_arm(shape, transport.device, steps, histories, changes)
        if transport.rank == 0:
            print(name, found[name]["losses"][0], found[name]["losses"][-1], flush=True)
    everyone = [json.loads(part) for part in transport.gather_bytes(json.dumps(found).encode())]
    if transport.rank == 0:
        result.write_text(json.dumps(everyone))
    transport.gather_bytes(b"")
    sys.stdout.flush()
    os._exit(0)  # several NCCL groups on one GPU would wait for each other


if __name__ == "__main__":
    shape, device, steps, histories, result = sys.argv[1:]
    main(shape, device, int(steps), Path(histories), Path(result))
