"""Streams of ids that come and go, and training on a dynamic table of them."""

from __future__ import annotations

import torch

import freescale
from freescale.embedding.dynamic_rules import After, Seen
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from helpers.collisions import bits
from helpers.dynamic_oracle import MASK, FineDynamic, mix
from helpers.toys import Clicks


def unmix(value: int) -> int:
    value = (value ^ (value >> 31) ^ (value >> 62)) * 0x319642B2D24D8EC3 & MASK
    value = (value ^ (value >> 27) ^ (value >> 54)) * 0x96DE1B173F119089 & MASK
    return value ^ (value >> 30) ^ (value >> 60)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def id_in(shard: int, number: int) -> int:
    """An id of a shard: streams meet in few of them, or nothing would ever be full."""
    return signed(unmix(shard << 52 | mix(number) >> 12))


SPECIAL = [-1, 0, 1, -(1 << 63), (1 << 63) - 1, signed(unmix(MASK)), signed(unmix(0))]


def _churn(steps: int = 14, size: int = 40) -> list[list[int]]:
    """Few popular ids, some of the batches before, and new ones; in shards of all ranks, some of
    which `After` sweeps in the last steps."""
    shards = (0, 8, 9, 11, 12, 1400, 2800, 4095)
    generator = torch.Generator().manual_seed(1)

    def draw(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    stream: list[list[int]] = []
    for step in range(steps):
        ids = [id_in(shards[draw(8)], draw(3)) for _ in range(size // 4)]
        ids += [id_in(shards[draw(8)], 100 * (step // 2) + draw(6)) for _ in range(size // 2)]
        if step:
            ids += [stream[-1][draw(size)] for _ in range(size // 8)]
        if step < 3:  # swept later, and nothing comes in their place
            ids += [id_in(shard, draw(4)) for shard in (10, 13)]
        ids += [SPECIAL[draw(len(SPECIAL))] for _ in range(size - len(ids))]
        stream.append(ids)
    return stream


CHURN = _churn()
RULES = [
    FineDynamic(4096 * 4, Seen(1), "lru"),
    FineDynamic(4096 * 4, Seen(2), "lfu"),
    FineDynamic(4096 * 4, Seen(2, room=4096 * 3), "lru", draws="history", default="learned"),
    FineDynamic(4096 * 5, Seen(1), After(3)),
]


class CorrectedClicks(Clicks):
    """Its loss knows how probable the events are as draws, where the table counts them."""

    def forward(self, batch):
        losses = super().forward(batch)
        history = batch.values("history")
        log_q = self.item.find_log_q(history)
        if log_q is not None:
            corrected = torch.tanh(self.item(history)).sum(1) * log_q.to(losses["click"].dtype)
            losses["click"] = losses["click"] + 0.01 * corrected.sum()
        return losses


def build(
    transport,
    schedule,
    rules,
    optimizer="adagrad",
    placement="sharded",
    lr=0.5,
    model=CorrectedClicks,
    exchange="auto",
    **options,
):
    """`rules`: None for a static table of 200 rows."""
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        model(),
        model.ids,
        ROW_OPTIMIZERS[optimizer](lr=lr),
        transport=transport,
        tables={"item": rules} if rules is not None else None,
        placement=placement,
        init_std=0.3,
        seed=5,
        exchange=exchange,
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    options = {"dense_sums": "collective", **options}
    return parallel, freescale.Pipeline(parallel, dense, schedule=schedule, **options)


def list_local_rows(parallel):
    """(ids [n] of this rank's rows, [n, ...] what the table holds of them: position, count and last
    use, then values)."""
    storage = parallel.tables.get_group("item").rows
    parts, first = storage.get_tensors("item"), storage.get_range("item").first
    used = (parts["last_use"] >= 0).nonzero().view(-1)
    numbers = [used + first, parts["count"][used], parts["last_use"][used]]
    others = sorted(set(parts) - {"ids", "count", "last_use"})
    values = [parts[name][used].unsqueeze(-1).flatten(1) for name in others]
    return parts["ids"][used], torch.cat([torch.stack(numbers, 1).double(), *values], 1)


def state_of(parallel):
    """Everything of one rank, rows in the order of ids."""
    storage = parallel.tables.get_group("item").rows
    parts = storage.get_tensors("item")
    used = (parts["last_use"] >= 0).nonzero().view(-1)
    order = used[parts["ids"][used].argsort()]
    found = {
        f"item/{name}": bits(value[order]) if value.is_floating_point() else value[order].clone()
        for name, value in parts.items()
    }
    found["item/position"] = order
    found |= {f"shards/{n}": v.clone() for n, v in storage.get_shard_tensors().items()}
    return found | {name: bits(value) for name, value in parallel.module.named_parameters()}
