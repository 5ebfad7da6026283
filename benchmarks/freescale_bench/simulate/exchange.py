"""Predicts the exchange of rows and gradients, flat against two-level, on 1 to 512 nodes of 8
GPUs: both hops one after another, although pieces overlap them. Three ways for the bytes: NCCL;
hostwire, which crosses PCIe within a node, too; and hostwire with a wire between the GPUs of a
node, which is not built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from freescale.config import SimulateConfig
from freescale.embedding.two_level import choose_exchange
from freescale.simulate.generated_workload import GeneratedWorkload
from freescale.simulate.inputs import build_cluster, build_workload
from freescale.simulate.network import Exchange, Network
from freescale_bench.common.results import Destination, Row, at_most, write

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
NETWORKS = ("paper", "h200", "ethernet")
# what carries bytes within a node, and between nodes
WAYS = {
    "NCCL": ("collective", "collective"),
    "hostwire": ("hostwire", "hostwire"),
    "hostwire and peer memory": ("collective", "hostwire"),
}
BUILT = ("NCCL", "hostwire")
WORST = 1.05  # that the chosen exchange may take, of the other


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
    network: Network, way: str, ranks: int, rank_bytes: float, node_bytes: float
) -> tuple[float, float]:
    """Seconds of an exchange of rows: flat, and in two levels. `rank_bytes`, `node_bytes`: of the
    rows that a rank reads, and the ranks of a node together. Gradients take as long."""
    node, none = network.node_size(ranks), np.zeros(ranks)
    inside, outside = WAYS[way]

    def time_hop(near: float, far: float, transport: str, peers: int) -> float:
        moved = [none + near, none + far]
        return float(network.time_all_to_all(Exchange(*moved, *moved), transport, peers).max())

    near, far = rank_bytes * (node - 1) / ranks, rank_bytes * (1 - node / ranks)
    if inside == outside:
        flat = time_hop(near, far, inside, ranks - 1)
    else:  # both at once
        flat = max(time_hop(near, 0.0, inside, node - 1), time_hop(0.0, far, outside, ranks - 1))
    if ranks == node:
        return flat, flat
    # Leaders share the node's rows evenly; each exchanges them with one rank of every other node.
    led = node_bytes / node * (1 - node / ranks)
    first = time_hop(0.0, led, outside, network.count_nodes(ranks) - 1)
    second = time_hop(rank_bytes * (node - 1) / node, 0.0, inside, node - 1)
    return flat, first + second


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
            for way in WAYS:
                flat, two = time_exchange(network, way, ranks, by_rank * width, by_node * width)
                machines = network.assign_nodes(ranks).tolist()
                rdma = name != "ethernet" and way != "NCCL"
                chosen, _ = choose_exchange("auto", machines, rdma)
                row: dict[str, Any] = {
                    "network": name,
                    "about": network.about,
                    "nodes": nodes,
                    "gpus": ranks,
                    "way": way,
                    "rows_per_rank": by_rank,
                    "rows_per_node": by_node,
                    "duplicates_percent": 100 * (1 - by_node / by_rank / (ranks // nodes)),
                    "flat_ms": 1e3 * flat,
                    "two_level_ms": 1e3 * two,
                    "auto": chosen,
                }
                rows.append(row)
                print(
                    f"{name:9s} {way:24s} {nodes:4d} nodes  flat {1e3 * flat:8.2f} ms  "
                    f"two-level {1e3 * two:8.2f} ms  duplicates {row['duplicates_percent']:.1f} %",
                    flush=True,
                )
    return rows


def bench_predicted_exchange(to: Destination) -> None:
    rows = simulate_exchange()
    claims = []
    for name, way in dict.fromkeys((row["network"], row["way"]) for row in rows):
        if way not in BUILT:
            continue
        worst = max(
            row[f"{row['auto'].replace('-', '_')}_ms"] / min(row["flat_ms"], row["two_level_ms"])
            for row in rows
            if (row["network"], row["way"]) == (name, way)
        )
        text = (
            f"predicted, {name}, {way}, 1 to {NODES[-1]} nodes: what auto chooses over the better"
        )
        claims.append(at_most(text, WORST, worst, "x"))
    write("simulate", "exchange", "freescale bench simulate exchange", rows, claims, to=to)
