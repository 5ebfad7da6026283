"""Streams of ids that come and go, and training on a dynamic table of them."""

from __future__ import annotations

import torch

import freescale
from freescale.embedding.dynamic_rules import After, Dynamic, Seen
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from helpers.collisions import bits
from helpers.dynamic_oracle import MASK, mix, shard_of
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
    """Few popular ids, some of the batches before, and new ones; in eight shards on all ranks."""
    generator = torch.Generator().manual_seed(1)

    def draw(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    stream: list[list[int]] = []
    for step in range(steps):
        ids = [id_in(draw(8) * 585, draw(3)) for _ in range(size // 4)]
        ids += [id_in(draw(8) * 585, 100 * (step // 2) + draw(6)) for _ in range(size // 2)]
        if step:
            ids += [stream[-1][draw(size)] for _ in range(size // 8)]
        ids += [SPECIAL[draw(len(SPECIAL))] for _ in range(size - len(ids))]
        stream.append(ids)
    return stream


CHURN = _churn()
RULES = [
    Dynamic(4096 * 4, Seen(1), "lru"),
    Dynamic(4096 * 4, Seen(2), "lfu"),
    Dynamic(4096 * 4, Seen(2, room=4096 * 3), "lru"),
    Dynamic(4096 * 5, Seen(1), After(3)),
]


def build(transport, schedule, rules, optimizer="adagrad", placement="sharded", lr=0.5, **options):
    """`rules`: None for a static table of 200 rows."""
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        Clicks(),
        Clicks.ids,
        ROW_OPTIMIZERS[optimizer](lr=lr),
        transport=transport,
        tables={"item": rules} if rules is not None else None,
        placement=placement,
        init_std=0.3,
        seed=5,
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    options = {"dense_sums": "collective", **options}
    return parallel, freescale.Pipeline(parallel, dense, schedule=schedule, **options)


def list_local_rows(parallel):
    """Of this rank: id -> (position, everything that the table holds of it, as bits)."""
    storage = parallel.tables.get_group("item").rows
    first = storage.get_range("item").first
    parts = storage.get_tensors("item")
    used = (parts["last_use"] >= 0).nonzero().view(-1)
    names = sorted(parts)
    values = [parts[name][used].reshape(used.numel(), -1).double() for name in names if name != "ids"]
    return parts["ids"][used], torch.cat([(used + first)[:, None].double(), *values], 1)


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
