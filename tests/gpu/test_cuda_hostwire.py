"""HostwireTransport between ranks that share a GPU: what arrives is what was sent, also beyond the
ring, through shared memory, on streams as between machines, and over UCX."""

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
carrier, rank = sys.argv[1], int(os.environ["RANK"])
os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"] = "tcp,self", "lo"
import freescale
from freescale.ledger.ledger import ThreadLedger
from freescale.transport.hostwire import opening
machines = {"streams": 1, "two machines": 2}.get(carrier, 0)  # ranks of each; 0: all
if machines:
    opening.identify_machine = lambda: b"machine %d" % (rank // machines)
over_ucx = carrier == "ucx"
name = "hostwire-ucx" if over_ucx else "hostwire-tcp"
transport = freescale.connect(torch.device("cuda:0"), timeout=20.0, transport=name)
path = "ucx: tcp" if over_ucx else ("shared memory", "tcp", "shared memory and tcp")[machines]
assert transport.describe_path() == "hostwire: " + path
assert type(transport._channel).__name__ == ("UcxChannel" if over_ucx else "EngineChannel")
lane = transport.channel(ThreadLedger(transport.ledger, "lane"))
world = transport.world
assert transport.rank == rank

def numbers(source, target, size):
    return torch.arange(size, device="cuda", dtype=torch.int32) * 7 + 1000 * source + target

for over in (lane, transport):
    # int32: up to 48 MB for each peer, of a ring of 32
    for size in (0, 1, 1000, 300_000, 6_000_000, 12_000_000):
        sizes = [
            [size * (source + 1) // (target + 1) for target in range(world)]
            for source in range(world)
        ]
        sent = torch.cat([numbers(rank, target, sizes[rank][target]) for target in range(world)])
        receive = [sizes[source][rank] for source in range(world)]
        came = over.all_to_all(sent, sizes[rank], receive, "rows").wait()
        # a rank that is done turns to something else, while others still send
        transport.gather_bytes(b"")
        expected = [numbers(source, rank, receive[source]) for source in range(world)]
        assert torch.equal(came, torch.cat(expected)), (rank, size)
    for size in (1000, 70_001, 3_000_001):
        mine = torch.full((size,), rank, device="cuda")
        everyone = torch.arange(world, device="cuda")[:, None].expand(-1, size)
        assert torch.equal(over.all_gather(mine, "rows").wait(), everyone)
under_way = [
    lane.all_to_all(torch.full((4000,), n, device="cuda"), [1000] * 4, [1000] * 4, "rows")
    for n in range(100)
]
for number, handle in enumerate(under_way):  # more than a channel keeps at once
    assert torch.equal(handle.wait(), torch.full((4000,), number, device="cuda"))
transport.close()
"""


@pytest.mark.parametrize("carrier", ["memory", "streams", "two machines", "ucx"])
def test_messages_of_all_sizes_on_ranks_beside_nccl(carrier, tmp_path):
    if carrier == "ucx":
        pytest.importorskip("ucxx", reason="hostwire-ucx needs ucxx, which is not installed here")
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
