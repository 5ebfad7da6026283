"""`freescale train` over two hosts that torchrun joins, as docs/guide/scale.md says: network
namespaces with an address each."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from freescale_bench.common.hosts import Network, open_hosts
from helpers.command import torchrun

from freescale.data.synthetic.generate import generate

ROOT = Path(__file__).resolve().parents[2]
PORT = 29544  # inside the namespaces, which have ports of their own
SMALL = [
    "--device",
    "cpu",
    "--global-batch",
    "16",
    "--width",
    "8",
    "--layers",
    "1",
    "--negatives",
    "8",
    "--max-length",
    "20",
]


@contextmanager
def two_hosts() -> Iterator[Network]:
    """And the link between them. Namespaces bear the number of this process, and go also after a
    failure."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(open_hosts(2, rate="1gbit"))
        except SystemExit as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        yield made


def on_every_host(network: Network, arguments: Sequence[object], timeout: float = 90) -> list[str]:
    """torchrun on each host, all at once; what each said. The first that fails fails the test."""
    meeting = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "10.99.0.1"]
    meeting += ["--master-port", PORT, "--node-rank"]
    with ExitStack() as stack:
        begun = [
            stack.enter_context(
                torchrun(
                    *(*meeting, place, "-m", "freescale", *arguments),
                    network=name,
                    GLOO_SOCKET_IFNAME=device,
                    OMP_NUM_THREADS="1",
                    PYTHONPATH=str(ROOT / "src"),
                )
            )
            for place, (name, device) in enumerate(zip(network.names, network.devices, strict=True))
        ]
        done = [host.ended(timeout) for host in begun]
    for host in done:
        assert host.returncode == 0, host.stderr
    return [host.stdout for host in done]


@pytest.mark.long
def test_two_hosts_train_and_resume(tmp_path):
    with two_hosts() as network:
        train_and_resume(network, tmp_path)


def train_and_resume(network: Network, tmp_path: Path) -> None:
    data = tmp_path / "histories.parquet"
    generate(
        data, users=96, items=20_000, median=12, cap=20, global_batch=16, ranks=2, collision=0.1
    )
    run = tmp_path / "run"  # storage that both hosts see
    common = [
        "train",
        "--data",
        str(data),
        "--folder",
        str(run),
        "--split",
        "none",
        "--no-shuffle",
        "--placement",
        "sharded",
    ]
    # auto would time both kinds of sums, and either may win
    common += ["--transport", "hostwire-tcp", "--dense-sums", "collective"]
    said = on_every_host(
        network,
        [*common, *SMALL, "--steps", "4", "--checkpoint-every", "2", "--log-every", "1"]
        + ["--exchange", "two-level"],
    )
    assert "exchange two-level (as requested)" in said[0]
    assert "2 ranks on cpu" in said[0] and "2 ranks" not in said[1]  # rank 0 speaks
    ledger = json.loads((run / "ledger.json").read_text())
    assert ledger["steps"] == 4 and ledger["ranks"] == 2
    far = [ledger["bytes_per_step"][kind] for kind in ("ids", "rows", "gradients")]
    assert sum(far) <= ledger["bytes_between_machines"]  # each host has a rank: all of them cross
    # not in shared memory
    assert ledger["bytes_per_step"]["rows"] > 0 and set(ledger["paths"]["rows"]) == {
        "hostwire: tcp"
    }
    assert set(ledger["paths"]["dense"]) == {"hostwire: tcp"}  # of two ranks, and little
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]
    # As a job that was stopped and queued again: the same folder, further.
    on_every_host(network, ["train", "--folder", run, "--resume", "--steps", "6"])
    assert json.loads((run / "ledger.json").read_text())["steps"] == 6
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "config.json").read_text())["train"]["steps"] == 6
    assert (run / "checkpoints" / "step-00000006" / "state.json").exists()


def test_namespaces_are_removed_after_a_failure():
    names: set[str] = set()
    with pytest.raises(ValueError, match="on purpose"), two_hosts() as network:
        names |= set(network.names)
        assert names <= namespaces()
        raise ValueError("on purpose")
    assert names and not names & namespaces()


def namespaces() -> set[str]:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[0] for line in listed.splitlines() if line}
