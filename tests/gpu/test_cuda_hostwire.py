"""HostwireTransport between ranks that share a GPU: what arrives is what was sent, also beyond the ring, in
C and in Python, and on streams as between machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCRIPT = """
import os, sys, torch
os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
os.environ["FREESCALE_ENGINE"] = "0" if sys.argv[1] == "python" or (sys.argv[1] == "mixed" and int(os.environ["RANK"]) % 2) else "1"
import freescale
from freescale.ledger.ledger import ThreadLedger
from freescale.transport import opening
machines = {"streams": 1, "two machines": 2}.get(sys.argv[1], 0)  # ranks of each; 0: all
if machines:
    opening.machine = lambda: b"machine %d" % (int(os.environ["RANK"]) // machines)
transport = freescale.connect(torch.device("cuda:0"), timeout=20.0, transport="hostwire-tcp" if machines else "hostwire-gloo")
assert transport.path_of() == "hostwire: " + ("shared memory", "tcp", "shared memory and tcp")[machines]
assert type(transport._channel).__name__ == ("Channel" if os.environ["FREESCALE_ENGINE"] == "0" else "EngineChannel")
lane = transport.channel(ThreadLedger(transport.ledger, "lane"))
rank, world = transport.rank, transport.world

def numbers(source, target, size):
    return torch.arange(size, device="cuda", dtype=torch.int32) * 7 + 1000 * source + target

for over in (lane, transport):
    for size in (0, 1, 1000, 300_000, 6_000_000, 12_000_000):  # int32: up to 48 MB for each peer, of a ring of 32
        sizes = [[size * (source + 1) // (target + 1) for target in range(world)] for source in range(world)]
        sent = torch.cat([numbers(rank, target, sizes[rank][target]) for target in range(world)])
        receive = [sizes[source][rank] for source in range(world)]
        came = over.all_to_all(sent, sizes[rank], receive, "rows").wait()
        transport.gather_bytes(b"")  # a rank that is done turns to something else, while others still send
        assert torch.equal(came, torch.cat([numbers(source, rank, receive[source]) for source in range(world)])), (rank, size)
    mine = torch.full((70_001,), rank, device="cuda")
    assert torch.equal(over.all_gather(mine, "rows").wait(), torch.arange(world, device="cuda")[:, None].expand(-1, 70_001))
under_way = [lane.all_to_all(torch.full((4 * 1000,), n, device="cuda"), [1000] * 4, [1000] * 4, "rows") for n in range(100)]
for number, handle in enumerate(under_way):  # more than a channel keeps at once
    assert torch.equal(handle.wait(), torch.full((4000,), number, device="cuda"))
transport.close()
"""


@pytest.mark.parametrize("carrier", ["engine", "mixed", "python", "streams", "two machines"])
def test_messages_of_all_sizes_on_ranks_beside_nccl(carrier, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(script),
        carrier,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
