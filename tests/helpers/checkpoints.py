"""Training of `Clicks` for the tests of checkpoints, and checkpoints of older formats."""

from __future__ import annotations

import json
import os
import sys

import torch

import freescale
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from helpers.toys import Clicks, clicks_batch, rank_slice


def build(transport, optimizer="adam", placement="sharded", **model):
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        Clicks(**model),
        Clicks.ids,
        ROW_OPTIMIZERS[optimizer](lr=0.1),
        transport=transport,
        placement=placement,
        init_std=0.3,
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    return parallel, dense, freescale.Pipeline(parallel, dense)


def batches(transport, first, last):
    return [
        rank_slice(clicks_batch(9, seed), transport.rank, transport.world)
        for seed in range(first, last)
    ]


def rewrite_as_format_1(path):
    """As it was written before there were checksums."""
    state = json.loads((path / "state.json").read_text())
    known = ("dense", "tables", "placement", "optimizer", "progress", "ranks", "device")
    (path / "state.json").write_text(
        json.dumps({"format": 1} | {key: state[key] for key in known if key in state})
    )


CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


def killed_at(number, action):
    """In a process of its own, which ends before its operation `number` on files. Whether there
    were so many."""
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event, arguments):
            nonlocal seen
            if event in CHANGES or (
                event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
            ):
                seen += 1
                if seen > number:
                    os._exit(9)

        try:
            sys.addaudithook(watch)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9
