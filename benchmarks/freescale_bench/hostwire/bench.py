"""Does urgent traffic overtake bulk? Two hosts, 200 Mbit/s (testbed A): an AllToAll of 1 MB per
peer alone, and behind one of 5 MB.

Arms, in turns: hostwire over TCP, gloo and UCX (TCP), its urgent class beside its bulk class; a
second gloo group beside the first; the same gloo group. Before every timed message the token bucket
is drained; the bulk has a head start of 20 ms.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch

from freescale.ledger.ledger import Ledger, ThreadLedger
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.process_group import ProcessGroupTransport
from freescale_bench.common.hosts import open_hosts
from freescale_bench.common.results import Destination, claim, write
from freescale_bench.common.spread import spread

URGENT, BULK, DRAIN = 1_000_000, 5_000_000, 200_000  # bytes per peer
HEAD_START = 0.02  # seconds
ASKED = 1.5
Pair = tuple[Any, Any]  # transports of the bulk and of the urgent message


def _hostwire(base: ProcessGroupTransport, wire: str) -> tuple[Pair, str, int]:
    over = HostwireTransport(
        "cpu", Ledger(), base.group, base.control, wire, timeout=timedelta(seconds=60)
    )
    pair = tuple(
        over.channel(ThreadLedger(over.ledger, name), urgent=name == "urgent")
        for name in ("bulk", "urgent")
    )
    return pair, over.describe_path(), over.piece  # type: ignore[return-value]


def _send(transport: Any, size: int, world: int) -> Any:
    part = torch.zeros(size * world, dtype=torch.uint8)
    return transport.all_to_all(part, [size] * world, [size] * world, "rows")


def measure(rank: int, world: int, repetitions: int) -> dict[str, Any]:
    os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": os.environ["GLOO_SOCKET_IFNAME"]}
    base = ProcessGroupTransport("cpu", Ledger(), timeout=timedelta(seconds=60))
    groups = [base.channel(ThreadLedger(base.ledger, name)) for name in ("bulk", "urgent")]
    arms: dict[str, Pair] = {}
    about: dict[str, Any] = {}
    for wire in ("tcp", "gloo", "ucx"):
        arms[f"hostwire-{wire}"], path, piece = _hostwire(base, wire)
        about[f"hostwire-{wire}"] = {"path": path, "piece_bytes": piece}
    arms["second gloo group"] = (groups[0], groups[1])
    arms["same gloo group"] = (groups[0], groups[0])
    found: dict[str, dict[str, list[float]]] = {
        name: {"alone": [], "behind": [], "bulk": []} for name in arms
    }
    for turn in range(repetitions + 1):
        for name, (bulk, urgent) in arms.items():
            _drain(base, base, world)
            begin = time.perf_counter()
            _send(urgent, URGENT, world).wait()
            alone = time.perf_counter() - begin
            _drain(base, bulk, world)
            begin = time.perf_counter()
            # as a lane does: who waits may have to carry it
            large = threading.Thread(target=_send(bulk, BULK, world).wait)
            large.start()
            time.sleep(HEAD_START)
            issued = time.perf_counter()
            _send(urgent, URGENT, world).wait()
            behind = time.perf_counter() - issued
            large.join()
            whole = time.perf_counter() - begin
            if turn:  # the first opens connections
                for what, seconds in (("alone", alone), ("behind", behind), ("bulk", whole)):
                    found[name][what].append(1e3 * seconds)
        if rank == 0:
            print(f"{turn} of {repetitions} turns", flush=True)
    return {"times": found, "about": about}


def _drain(base: ProcessGroupTransport, transport: Any, world: int) -> None:
    """What the bucket lets through for free is gone, and the hosts begin together."""
    _send(transport, DRAIN, world).wait()
    base.gather_bytes(b"")


def bench_hostwire(repetitions: int, to: Destination) -> None:
    with open_hosts(2) as network:
        results = network.run(measure, repetitions)
    rows, claims = [], []
    for name in results[0]["times"]:
        # A message is there when the slower host has it.
        slower = {
            what: [
                max(pair)
                for pair in zip(*(result["times"][name][what] for result in results), strict=True)
            ]
            for what in ("alone", "behind", "bulk")
        }
        row: dict[str, Any] = {"arm": name, **results[0]["about"].get(name, {})}
        row |= {f"{what}_ms": spread(times) for what, times in slower.items()}
        row["behind_over_alone"] = row["behind_ms"]["median"] / row["alone_ms"]["median"]
        rows.append(row)
        print(
            (
                f"{name:20s} alone {row['alone_ms']['median']:6.1f} ms  behind "
                f"{row['behind_ms']['median']:6.1f} ms"
            ),
            end="  ",
        )
        print(
            f"= {row['behind_over_alone']:.2f} x  with the bulk {row['bulk_ms']['median']:6.1f} ms"
        )
        if name.startswith("hostwire"):
            text = f"{name}: urgent 1 MB per peer behind 5 MB of bulk, over its time alone"
            claims.append(claim(text, ASKED, row["behind_over_alone"], "times", at_least=False))
    command = f"freescale bench hostwire --repetitions {repetitions}"
    sizes = {
        "urgent_bytes": URGENT,
        "bulk_bytes": BULK,
        "head_start_ms": 1e3 * HEAD_START,
        "rate": "200 Mbit/s",
    }
    write("hostwire", "hosts", command, rows, claims, ("ucxx-cu13",), to=to, **sizes)
