"""Streams of ids that collide from batch to batch at a chosen rate, and training on them with
either schedule."""

from __future__ import annotations

import time
from functools import partial

import torch
from freescale_bench.staged.stale import no_collisions

import freescale
from freescale.batch import Jagged, SequenceBatch
from freescale.embedding import collision
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.pipeline.row_stages import plan_stages
from freescale.pipeline.staged import Staged
from freescale.transport.process_group import ProcessGroupTransport
from helpers.toys import Clicks
from helpers.training import gather_tables

ITEMS = 6000
STEPS = 12


def batch_of(ids: list[int], number: int, per_sample: int = 5) -> SequenceBatch:
    """Samples of up to `per_sample` ids each; the last id of a sample is also its `extra` feature,
    a second reader of the table."""
    values = torch.tensor(ids, dtype=torch.int64)
    full, rest = divmod(len(ids), per_sample)
    lengths = torch.tensor([per_sample] * full + [rest] * bool(rest), dtype=torch.int64)
    ends = lengths.cumsum(0) - 1
    samples = lengths.numel()
    generator = torch.Generator().manual_seed(number)
    return SequenceBatch(
        sequences={"history": Jagged(values, lengths), "actions": Jagged(values % 5, lengths)},
        dense={
            "extra": values[ends][:, None].expand(-1, 3).contiguous()
            if samples
            else values.new_zeros(0, 3),
            "labels": torch.randint(0, 2, (samples, 2), generator=generator).float(),
        },
        weights={"click": torch.ones(samples), "like": torch.ones(samples)},
        keys=torch.arange(samples),
        number=number,
    )


def colliding(share: float, steps: int = STEPS, size: int = 40, seed: int = 0) -> list[list[int]]:
    """Ids of each global batch; about `share` of them are in the batch before."""
    generator = torch.Generator().manual_seed(seed)
    fresh, before, stream = 0, [], []
    for _ in range(steps):
        again = (
            [
                before[i]
                for i in torch.randperm(len(before), generator=generator).tolist()[
                    : round(share * size)
                ]
            ]
            if before
            else []
        )
        new = [(fresh + i) % ITEMS for i in range(size - len(again))]
        fresh += len(new)
        before = [(again + new)[i] for i in torch.randperm(size, generator=generator).tolist()]
        stream.append(before)
    return stream


def share_of(batch: SequenceBatch, transport) -> SequenceBatch:
    """Uneven slices; with few samples some ranks have none."""
    edges = [
        len(batch) * rank * (rank + 1) // (transport.world * (transport.world + 1))
        for rank in range(transport.world + 1)
    ]
    return batch.slice(edges[transport.rank], edges[transport.rank + 1])


class StagedAsOnGpus(Staged):
    """In the order in which lanes of a GPU do it: ids a step earlier, decisions while batches are
    compared."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._on_host = False
        self._plan = self._stages._plan = plan_stages(torch.device("cuda"), nearby=True)


def build(
    transport,
    schedule,
    optimizer="adagrad",
    model=None,
    placement="sharded",
    lr=0.5,
    wire=None,
    exchange="auto",
    **options,
):
    torch.manual_seed(3)
    model = model() if model is not None else Clicks(items=ITEMS)
    rows = ROW_OPTIMIZERS[optimizer](lr=lr)
    shape = {"placement": placement, "init_std": 0.3, "seed": 5, "wire_dtype": wire}
    shape |= {"exchange": exchange}
    parallel = freescale.parallelize(model, model.ids, rows, transport=transport, **shape)
    if schedule == "stale":
        schedule = partial(Staged, masks=no_collisions)
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    # which of the two is faster here must not decide about bits that are compared
    options = {"dense_sums": "collective", **options}
    return parallel, freescale.Pipeline(parallel, dense, schedule=schedule, **options)


def bits(tensor):
    return tensor.detach().clone().view(torch.int64)


def state_of(parallel):
    whole = gather_tables(parallel) | dict(parallel.module.named_parameters())
    return {name: bits(value) for name, value in whole.items()}


def in_pieces() -> None:
    collision._LEAST_BYTES["cpu"], collision._LEAST_MESSAGE = 256, 1


def train(transport, schedule, stream, held_up=None, **options):
    """`held_up`: draws how long this rank's batches keep it waiting."""
    if isinstance(transport, ProcessGroupTransport):
        in_pieces()
    parallel, pipeline = build(transport, schedule, **options)

    def share(ids, number):
        if held_up is not None and held_up.random() < 0.3:
            time.sleep(held_up.random() * 0.02)
        return share_of(batch_of(ids, number), transport)

    batches = (share(ids, number) for number, ids in enumerate(stream))
    losses = [result.loss for result in pipeline.run(batches)]
    return losses, state_of(parallel)
