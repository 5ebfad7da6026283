"""examples/slurm/train.sbatch on a real Slurm of three nodes: a node is lost, the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.weights import read_weights

from freescale.data.synthetic.generate import generate
from integration.named_hosts import INTERFACE
from integration.slurm_cluster import Cluster, find_missing, open_cluster

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [
    *("--device", "cpu", "--global-batch", "16", "--width", "8", "--layers", "1"),
    *("--negatives", "8", "--max-length", "20", "--epochs", "60", "--checkpoint-every", "10"),
    *("--dense-sums", "collective"),  # `auto` measures: two runs may choose differently
]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := find_missing():
        pytest.skip(f"{', '.join(missing)} missing: apt-get install slurm-wlm munge iproute2")
    folder = tmp_path_factory.mktemp("slurm")
    with open_cluster(folder, 3) as made:
        generate(folder / "data.parquet", users=96, items=500, median=12, cap=20, seed=0)
        yield made


def submit(cluster: Cluster, run: Path, *options: str, more: list[str] | None = None) -> str:
    """Queues the example on two nodes with two ranks each."""
    told = {
        "DATA": str(cluster.folder / "data.parquet"),
        "RUN": str(run),
        "RANKS": "2",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "PYTHONPATH": str(ROOT / "src"),
    }
    words = ["--parsable", "--nodes=2", "--cpus-per-task=2", f"--chdir={cluster.folder}", *options]
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    return cluster.call("sbatch", *words, script, *TRAIN, *(more or []), **told)


def wait_for(cluster: Cluster, condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, cluster.read_logs()
        time.sleep(0.3)


def wait_end(cluster: Cluster, job: str) -> dict[str, str]:
    wait_for(cluster, lambda: cluster.find_state(job)["JobState"] in ENDED)
    return cluster.find_state(job)


def find_steps(run: Path) -> list[int]:
    names = (path.name for path in (run / "checkpoints").glob("step-*"))
    return sorted(int(name.removeprefix("step-")) for name in names)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[str, bytes]:
    run = cluster.folder / "undisturbed"
    state = wait_end(cluster, submit(cluster, run))
    assert state["JobState"] == "COMPLETED" and state["NodeList"] == "node[1-2]", state
    return read_weights(run, cluster.folder / "export-undisturbed")


@pytest.mark.long
def test_a_node_is_lost(cluster: Cluster, undisturbed: dict[str, bytes]) -> None:
    run = cluster.folder / "node-lost"
    job = submit(cluster, run)
    wait_for(cluster, lambda: len(find_steps(run)) > 0)
    cluster.kill_node("node2")
    wait_for(cluster, lambda: cluster.find_state(job)["Restarts"] != "0")
    state = wait_end(cluster, job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), state
    assert state["NodeList"] == "node[1,3]"
    assert read_weights(run, cluster.folder / "export-node-lost") == undisturbed
    cluster.start_node("node2")
    wait_for(cluster, lambda: cluster.count_idle() == 3)


@pytest.mark.long
def test_the_time_is_up(cluster: Cluster, undisturbed: dict[str, bytes]) -> None:
    """Slurm's signal comes before the end: the run saves, and the next job ends it."""
    run = cluster.folder / "time-up"
    never = ["--checkpoint-every", "100000"]  # what is saved, is saved at the signal
    job = submit(cluster, run, "--signal=TERM@30", more=[*never, "--epochs", "40000"])
    wait_for(cluster, lambda: (run / "metrics.jsonl").exists())
    hours, minutes, _ = map(int, cluster.find_state(job)["RunTime"].split(":"))
    limit = 60 * hours + minutes + 2  # minutes
    cluster.call("scontrol", "update", f"jobid={job}", f"timelimit={limit}")
    assert wait_end(cluster, job)["JobState"] in ("FAILED", "COMPLETED", "TIMEOUT")
    (saved,) = find_steps(run)
    job = submit(cluster, run, more=[*never, "--steps", str(saved + 20), "--epochs", "40000"])
    assert wait_end(cluster, job)["JobState"] == "COMPLETED"
    assert find_steps(run)[-1] == saved + 20
    job = submit(cluster, whole := cluster.folder / "time-whole",
                 more=[*never, "--steps", str(saved + 20), "--epochs", "40000"])  # fmt: skip
    assert wait_end(cluster, job)["JobState"] == "COMPLETED"
    weights = (read_weights(each, cluster.folder / f"export-{each.name}") for each in (run, whole))
    assert next(weights) == next(weights)
