"""Training of `Clicks` on a GPU: the serial and the staged schedule, to the bit."""

from __future__ import annotations

from functools import partial

import torch

import freescale
from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.embedding import collision
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.pipeline.staged import Staged
from helpers.toys import Clicks, clicks_batch, rank_slice


class CudaClicks(Clicks):
    def forward(self, batch):
        with torch.device(batch.device):
            return super().forward(batch)


STEPS = 30


def no_collisions(current, following):
    return torch.zeros_like(current, dtype=torch.bool), torch.zeros_like(
        following, dtype=torch.bool
    )


def train(
    transport,
    schedule,
    optimizer="adagrad",
    balanced=False,
    dtype=torch.float64,
    placement="sharded",
    items=None,
    **options,
):
    """Losses and the bits of this rank's tables and of the dense weights. About a third of the rows
    collide."""
    collision._LEAST_BYTES["cuda"], collision._LEAST_MESSAGE = 256, 1  # several pieces
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    rows = ROW_OPTIMIZERS[optimizer](lr=0.3)
    parallel = freescale.parallelize(
        CudaClicks(dtype=dtype, **({} if items is None else {"items": items})),
        Clicks.ids,
        rows,
        transport=transport,
        placement=placement,
        init_std=0.3,
    )
    if balanced:
        options["balance"] = Balancer(PARTITIONERS["greedy"], CostModel.balanced_at(5))
    if schedule == "stale":
        schedule = partial(Staged, masks=no_collisions)
    pipeline = freescale.Pipeline(
        parallel,
        torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2),
        schedule=schedule,
        **{"precision": "fp32", "dense_sums": "collective", **options},
    )
    drawn = {} if items is None else {"items": items}
    batches = [
        rank_slice(clicks_batch(40, seed, **drawn), transport.rank, transport.world)
        for seed in range(STEPS)
    ]
    losses = [result.loss for result in pipeline.run(batches)]
    state = {
        f"{name}/{part}": value
        for name in parallel.tables.specs
        for part, value in parallel.tables.get_local_state(name).items()
    }
    state |= dict(parallel.module.named_parameters())
    torch.use_deterministic_algorithms(False)
    return losses, {
        name: value.detach().clone().view(torch.uint8).cpu() for name, value in state.items()
    }


def differences(transport, schedule="staged", **options):
    losses, expected = train(transport, "serial", **options)
    actual_losses, actual = train(transport, schedule, **options)
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    return different + ["losses"] * (losses != actual_losses)
