"""What each host of the compress benchmark runs. `Network.run` calls each function with rank and
number of ranks first."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import freescale
from freescale.ledger.ledger import Ledger
from freescale.transport.process_group import ProcessGroupTransport
from freescale_bench.common.arm import build
from freescale_bench.common.turns import take_turns
from freescale_bench.common.workload import Workload

DENSE, WHOLE, THRESHOLDED = "dense AllReduce", "whole rows", "thresholded"


def measure(
    rank: int, world: int, workload: Workload, eta: float, repetitions: int, steps: int
) -> dict[str, Any]:
    """Both arms in turn, on the same batches from the same weights; and whether the ranks' dense
    weights still agree to the bit."""
    arms = {
        DENSE: build(workload, rank, world),
        THRESHOLDED: build(workload, rank, world, reducer=freescale.Thresholding(eta)),
    }
    measured = take_turns(arms, repetitions, steps)
    for name, arm in arms.items():
        weights = torch.cat(
            [p.detach().view(-1).view(torch.int32) for p in arm.parallel.dense_parameters()]
        )
        sums = arm.transport.all_gather(weights.long().sum()[None], "counts").wait()
        measured[name]["agree"] = bool((sums == sums[0]).all())
        measured[name]["dense_parameters"] = weights.numel()
    return measured


def exchange_activations(
    rank: int, world: int, rows: int, width: int, keep: int, repetitions: int
) -> dict[str, list[dict[str, float]]]:
    """An exchange of activations there and of their gradients back, all to the next rank: whole and
    thresholded in turn."""
    transport = ProcessGroupTransport("cpu", Ledger("cpu"))
    assert isinstance(transport.ledger, Ledger)
    send, receive = (
        [rows if peer == (rank + step) % world else 0 for peer in range(world)] for step in (1, -1)
    )
    found: dict[str, list[dict[str, float]]] = {WHOLE: [], THRESHOLDED: []}
    for repetition in range(repetitions + 1):
        x = torch.randn(
            rows, width, generator=torch.Generator().manual_seed(repetition * world + rank)
        ).requires_grad_()
        for name, kept in ((WHOLE, width), (THRESHOLDED, keep)):
            exchange = freescale.ThresholdedExchange(transport, kept)
            dist.barrier()
            transport.ledger.begin_step(repetition)
            begin = time.perf_counter()
            exchange(x, send, receive).square().sum().backward()
            seconds = time.perf_counter() - begin
            transport.ledger.end_step()
            (record,) = transport.ledger.drain()
            if repetition:
                moved = {
                    kind: sum(c[1] for c in record["collectives"] if c[0] == kind)
                    for kind in ("rows", "gradients")
                }
                found[name].append({"ms": seconds * 1e3, **moved, **record["counters"]})
    return found
