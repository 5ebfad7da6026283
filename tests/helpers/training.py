"""Training of `Clicks`, and what its tables and weights hold afterwards."""

from __future__ import annotations

import torch

import freescale
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from helpers.toys import Clicks


def build(
    transport, optimizer="adagrad", placement="sharded", lr=0.1, schedule="serial", **options
):
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        Clicks(),
        Clicks.ids,
        ROW_OPTIMIZERS[optimizer](lr=lr),
        transport=transport,
        placement=placement,
        init_std=0.3,
        seed=5,
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    return parallel, freescale.Pipeline(parallel, dense, schedule=schedule, **options)


def gather_tables(parallel):
    """Every table and its row-optimizer state in the order of ids, on every rank."""
    tables = parallel.tables
    result = {}
    for name, spec in tables.specs.items():
        rows = tables.get_group(name).rows
        ids = rows.get_ids(name)
        for part, local in rows.get_tensors(name).items():
            whole = torch.full((spec.rows, *local.shape[1:]), float("nan"), dtype=local.dtype)
            if tables.placements[name].kind == "replicated":
                whole[ids] = local
            else:
                whole.zero_()
                whole[ids] = local
                tables.transport.all_reduce(whole, "dense").wait()
            result[f"{name}/{part}"] = whole
    return result


def snapshot(parallel):
    return gather_tables(parallel) | {
        n: p.detach().clone() for n, p in parallel.module.named_parameters()
    }


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}"
        )
