"""The schedule of a single rank with the kernels of a GPU, against the serial schedule with the
same ones. As a program: through Triton's interpreter, as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

import freescale
from freescale.embedding.groups import local, sharded
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.kernels.dispatch import rows as dispatch
from freescale.kernels.requests import triton as triton_requests
from freescale.kernels.row_sums import triton as triton_row_sums
from freescale.pipeline.process_memory import freeze_objects
from freescale.transport.local import LocalTransport
from helpers.gpu_training import CudaClicks
from helpers.toys import Clicks, clicks_batch

CASES = {
    **{name: {"optimizer": name} for name in ROW_OPTIMIZERS},
    "accumulation": {"accumulate": 2},
    "row clip": {"row_clip": 0.05},
    "replicated": {"placement": {"item": "sharded", "action": "replicated"}, "optimizer": "adam"},
    "ids of the model's own": {"model": "Derived"},
    "rows that the model reads by itself": {"model": "Offered", "optimizer": "adam"},
    "the same, replicated": {"model": "Offered", "placement": "replicated", "row_clip": 0.05},
    "a table that is not read": {"model": "Partial", "optimizer": "adam"},
    "rounded": {"wire_dtype": torch.bfloat16},
    "padding": {"model": "Padded"},
    "pooled": {"model": "Pooled", "optimizer": "adam"},
    "host memory": {"placement": "host:4kB", "model": "Derived", "optimizer": "adam"},
}
# what the serial schedule is given instead
ORACLES = {"host memory": {"placement": "sharded"}}


class Derived(CudaClicks):
    """Reads a table by ids that it makes, and one feature twice."""

    def forward(self, batch):
        found = super().forward(batch)
        ids = batch.values("history")
        again = self.item(ids.clone().flip(0)) + self.item(ids)
        return {name: loss + again.tanh().sum() for name, loss in found.items()}


class Offered(CudaClicks):
    """Takes all rows of a table and reads them by itself, beside other readings."""

    def forward(self, batch):
        found = super().forward(batch)
        rows, index = self.item.locate(batch.values("history"))
        again, extra = self.item.locate(batch.dense["extra"])
        assert again is rows
        more = F.embedding(index, rows).tanh().sum() + F.embedding(extra, rows).sin().sum()
        return {name: loss + more for name, loss in found.items()}


class Partial(CudaClicks):
    """Reads one of its two features in every other batch only."""

    def forward(self, batch):
        extra = batch.dense["extra"]
        logits = self.layers(self.item(extra).sum(1))
        if batch.number % 2:
            tokens = self.item(batch.values("history")).sum(0) + self.action(
                batch.values("actions")
            ).sum(0)
            logits = logits + tokens.mean()
        return {"click": logits[:, 0].tanh().sum(), "like": logits[:, 1].square().sum()}


class Padded(CudaClicks):
    def __init__(self, **options):
        super().__init__(**options)
        self.item.padding_idx = 3


class Pooled(CudaClicks):
    """Pools one table by EmbeddingBag, beside readings of another in the same group."""

    def __init__(self, **options):
        super().__init__(**options)
        self.action = nn.EmbeddingBag(
            5, 4, mode="mean", padding_idx=1, dtype=options["dtype"], device="meta"
        )

    def forward(self, batch):
        actions = batch.sequences["actions"]
        pooled = self.action(actions.values, actions.offsets[:-1])
        logits = self.layers(self.item(batch.dense["extra"]).sum(1) + pooled)
        return {"click": logits[:, 0].tanh().sum(), "like": logits[:, 1].square().sum()}


MODELS = {
    "Clicks": CudaClicks,
    "Derived": Derived,
    "Offered": Offered,
    "Partial": Partial,
    "Padded": Padded,
    "Pooled": Pooled,
}


def train(
    schedule, optimizer="adagrad", model="Clicks", placement="sharded", device="cpu", **options
):
    """The bits of tables, row state and dense weights, and the losses."""
    torch.manual_seed(3)
    rows = {name: options.pop(name) for name in ("row_clip", "wire_dtype") if name in options}
    parallel = freescale.parallelize(
        MODELS[model](items=30, width=4, dtype=torch.float32),
        Clicks.ids,
        ROW_OPTIMIZERS[optimizer](lr=0.3),
        transport=LocalTransport(device),
        placement=placement,
        init_std=0.3,
        **rows,
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    # samples of some models depend on each other
    pipeline = freescale.Pipeline(parallel, dense, schedule=schedule, check=False, **options)
    steps, samples, longest = (3, 5, 9) if device == "cpu" else (20, 200, 30)
    batches = [clicks_batch(samples, seed, 30, longest) for seed in range(steps)]
    losses = [result.loss for result in pipeline.run(batches)]
    state = dict(parallel.module.named_parameters())
    for name in parallel.tables.specs:
        for part, value in parallel.tables.get_local_state(name).items():
            state[f"{name}/{part}"] = value
    return losses, {name: value.detach().cpu().clone() for name, value in state.items()}


def differences(case, device="cpu"):
    """What is not bit-equal to the serial schedule."""
    (losses, expected), (own_losses, own) = (
        train(schedule, device=device, **CASES[case] | changed)
        for schedule, changed in (("serial", ORACLES.get(case, {})), ("staged", {}))
    )
    different = [
        name
        for name, value in expected.items()
        if own[name].numpy().tobytes() != value.numpy().tobytes()
    ]
    return different + ["losses"] * (losses != own_losses)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dispatch._fits_triton = lambda table, dtypes=None: table.dtype == torch.float32
    sharded.deduplicate = local.deduplicate = triton_requests.deduplicate
    triton_row_sums.CHUNK = 8
    with freeze_objects():
        found = {}
        for case in CASES:
            found[case] = differences(case)
            print(case, found[case], file=sys.stderr, flush=True)
        print(json.dumps(found))
