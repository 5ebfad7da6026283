"""Predicts the exchange of rows and gradients, flat against two-level, on 1 to 512 nodes of 8
GPUs: both hops one after another, although pieces overlap them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from freescale.config import SimulateConfig
from freescale.embedding.two_level import choose_exchange
from freescale.simulate.generated_workload import GeneratedWorkload
from freescale.simulate.inputs import build_cluster, build_workload
from freescale.simulate.network import TRANSPORTS, Exchange, Network
from freescale_bench.common.results import Destination, Row, at_least, write

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NETWORKS = ("paper", "h200", "ethernet")
TARGET = 8  # nodes at which two levels should be faster


def count_rows(workload: GeneratedWorkload, ranks: int, node: int) -> tuple[float, float]:
    """Rows that a rank reads in a step, and that the ranks of a node read together: means."""
    lengths = workload.get_lengths(0)
    read = workload.find_requests(0, np.arange(len(lengths)) % ranks, ranks)
    nodes = read.tokens.reshape(-1, node).sum(1)
    together = replace(read, tokens=nodes, samples=read.samples.reshape(-1, node).sum(1))
    by_rank, by_node = (
        float(workload.compute_demand(None, one, None).whole.requested.mean())
        for one in (read, together)
    )
    return by_rank, by_node


def time_exchange(
    network: Network, transport: str, ranks: int, rank_bytes: float, node_bytes: float
) -> tuple[float, float]:
    """Seconds of an exchange of rows: flat, and in two levels. `rank_bytes`, `node_bytes`: of the
    rows that a rank reads, and the ranks of a node together. Gradients take as long."""
    node, none = network.node_size(ranks), np.zeros(ranks)
    even = np.full(ranks, rank_bytes)
    flat = network.time_all_to_all(network.split_exchange(even, even), transport)
    # a leader requests an even share of the node's rows, those of other nodes from afar
    led = np.full(ranks, node_bytes / node * (1 - node / ranks))
    near = np.full(ranks, rank_bytes * (node - 1) / node)
    hops = [
        network.time_all_to_all(moved, transport)
        for moved in (Exchange(none, led, none, led), Exchange(near, none, near, none))
    ]
    return float(flat.max()), float(sum(hops).max() if ranks > node else flat.max())


def simulate_exchange(most: int = NODES[-1]) -> list[Row]:
    rows: list[Row] = []
    config = SimulateConfig()
    for name in NETWORKS:
        own = replace(config, preset=name)
        for nodes in (count for count in NODES if count <= most):
            ranks = nodes * build_cluster(own, 8).network.gpus_per_node
            cluster, workload = build_cluster(own, ranks), build_workload(own, ranks)
            assert isinstance(workload, GeneratedWorkload)
            network, width = cluster.network, cluster.model.sent_row_bytes
            by_rank, by_node = count_rows(workload, ranks, network.node_size(ranks))
            for transport in TRANSPORTS:
                flat, two = time_exchange(
                    network, transport, ranks, by_rank * width, by_node * width
                )
                chosen, _ = choose_exchange("auto", network.assign_nodes(ranks).tolist())
                row: dict[str, Any] = {
                    "network": name,
                    "about": network.about,
                    "nodes": nodes,
                    "gpus": ranks,
                    "transport": transport,
                    "rows_per_rank": by_rank,
                    "rows_per_node": by_node,
                    "duplicates_percent": 100 * (1 - by_node / by_rank / (ranks // nodes)),
                    "flat_ms": 1e3 * flat,
                    "two_level_ms": 1e3 * two,
                    "auto": chosen,
                }
                rows.append(row)
                print(
                    f"{name:9s} {transport:10s} {nodes:4d} nodes  flat {1e3 * flat:8.2f} ms  "
                    f"two-level {1e3 * two:8.2f} ms  duplicates {row['duplicates_percent']:.1f} %",
                    flush=True,
                )
    return rows


def bench_predicted_exchange(to: Destination) -> None:
    rows = simulate_exchange()
    claims = [
        at_least(
            f"predicted: {row['network']}, {TARGET} nodes, {row['transport']}: flat over two-level",
            1.0,
            row["flat_ms"] / row["two_level_ms"],
            "times",
        )
        for row in rows
        if row["nodes"] == TARGET
    ]
    write("simulate", "exchange", "freescale bench simulate exchange", rows, claims, to=to)
