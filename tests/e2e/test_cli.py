"""The command line as a user meets it: real processes, real files, every bad input."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.command import Begun, freescale, started, torchrun, wait_for
from helpers.small_runs import SMALL, interactions, metrics, train

from freescale.launch.ranks import find_free_port


@pytest.mark.long
def test_train_resume_eval_export(tmp_path):
    """A run of two ranks, stopped in the middle and resumed, writes what an uninterrupted one
    writes, to the bit."""
    data = interactions(tmp_path / "events.parquet")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = train(tmp_path / "a", data, "--nproc", 2, "--epochs", 4, run=started)
    assert whole.returncode == 0, whole.stderr
    run = tmp_path / "a" / "run"
    assert {p.name for p in run.iterdir()} >= {
        "config.json",
        "metrics.jsonl",
        "ledger.json",
        "ledger.jsonl",
        "trace.json.gz",
        "checkpoints",
    }
    ledger = json.loads((run / "ledger.json").read_text())
    assert ledger["ranks"] == 2 and ledger["steps"] == 12 and ledger["samples_per_second"] > 0
    assert len(ledger["peak_memory_bytes_per_rank"]) == 2 and "straggler_percent" in ledger
    with gzip.open(run / "trace.json.gz", "rt") as file:
        assert {e["pid"] for e in json.load(file)["traceEvents"]} == {0, 1}
    assert "HR@10" in whole.stdout and "straggler" in whole.stdout and "popularity" in whole.stdout

    first = train(
        tmp_path / "b", data, "--nproc", 2, "--epochs", 4, "--steps", 6, "--checkpoint-every", 4
    )
    assert first.returncode == 0, first.stderr
    again = freescale(
        "train", "--folder", tmp_path / "b" / "run", "--resume", "--nproc", 2, "--steps", 12
    )
    assert again.returncode == 0, again.stderr
    expected = metrics(tmp_path / "a")
    assert [m for m in metrics(tmp_path / "b") if m.get("step") != 6 or "test" not in m] == expected

    before = (run / "ledger.json").read_text()
    finished = freescale("train", "--folder", run, "--resume")
    assert finished.returncode == 1 and "has made 12 steps, and --epochs" in finished.stderr
    assert (run / "ledger.json").read_text() == before and metrics(tmp_path / "a") == expected
    resumed = json.loads((tmp_path / "b" / "run" / "ledger.json").read_text())
    assert resumed["steps"] == 12, "the ledger of a resumed run covers all its steps"
    assert json.loads((tmp_path / "b" / "run" / "config.json").read_text())["train"]["steps"] == 12

    evaluated = freescale("eval", run, "--nproc", 2, "--device", "cpu")
    assert evaluated.returncode == 0, evaluated.stderr
    quality = json.loads((run / "eval-test.json").read_text())["quality"]
    assert quality == expected[-1]["test"] and "popularity" in evaluated.stdout
    exported = freescale("export", run, "--out", tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "config.json",
        "dense.safetensors",
        "export.json",
        "items.parquet",
        "table.item.safetensors",
    }


def test_schedules_write_the_same(tmp_path):
    """Staged (the default), stopped and resumed, and serial differ in time only."""
    data = interactions(tmp_path / "events.parquet")
    (tmp_path / "staged").mkdir(), (tmp_path / "serial").mkdir()
    options = ["--nproc", 2, "--epochs", 4, "--placement", "sharded", "--row-lr", 0.1]
    first = train(tmp_path / "staged", data, *options, "--steps", 7)
    again = freescale(
        "train", "--folder", tmp_path / "staged" / "run", "--resume", "--nproc", 2, "--steps", 12
    )
    serial = train(tmp_path / "serial", data, *options, "--schedule", "serial")
    assert [done.returncode for done in (first, again, serial)] == [0, 0, 0], (
        first.stderr + again.stderr + serial.stderr
    )
    assert "schedule staged" in first.stdout and "schedule serial" in serial.stdout
    expected = metrics(tmp_path / "serial")
    assert [m for m in metrics(tmp_path / "staged") if m.get("step") != 7] == expected and expected[
        -1
    ]["step"] == 12


def test_transports_write_the_same(tmp_path):
    """Losses and the ledger do not depend on what carries the bytes, apart from times and the names
    of the paths."""
    data = interactions(tmp_path / "events.parquet")
    found = {}
    for transport in ("collective", "hostwire-tcp", "hostwire-ucx"):
        folder = tmp_path / transport
        folder.mkdir()
        options = ["--nproc", 2, "--epochs", 2, "--placement", "sharded", "--transport", transport]
        options += ["--dense-sums", "collective"]  # by default whatever is faster
        done = train(folder, data, *options, UCX_TLS="tcp,self", UCX_NET_DEVICES="lo")
        assert done.returncode == 0, done.stderr
        assert f"transport {transport} (as requested)" in done.stdout
        ledger = json.loads((folder / "run" / "ledger.json").read_text())
        same = (
            "ranks",
            "steps",
            "measured_steps",
            "bytes_per_step",
            "collision_percent",
            "sparsity",
            "predicted_imbalance",
        )
        found[transport] = metrics(folder), {name: ledger[name] for name in same}
        carried = {
            kind: set(paths)
            for kind, paths in ledger["paths"].items()
            if ledger["bytes_per_step"][kind]
        }
        wire = {
            "collective": "gloo",
            "hostwire-tcp": "hostwire: shared memory",
            "hostwire-ucx": "hostwire: ucx: tcp",
        }[transport]
        # samples are too few to move
        assert set(carried) == {"counts", "ids", "rows", "gradients", "dense"}
        assert all(paths == {wire} for paths in carried.values()), carried
    assert found["collective"] == found["hostwire-tcp"] == found["hostwire-ucx"]


def test_a_run_with_a_removed_transport_starts_and_resumes(tmp_path):
    """Its configuration keeps the old name; every start prints what replaces it."""
    data = interactions(tmp_path / "events.parquet")
    options = ["--nproc", 2, "--transport", "hostwire-gloo"]
    first = train(tmp_path, data, *options, "--steps", 2, "--checkpoint-every", 2)
    command = ["--folder", tmp_path / "run", "--resume", "--nproc", 2, "--steps", 4]
    for done in (first, freescale("train", *command)):
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("transport hostwire-gloo is now hostwire-tcp") == 1
        assert "transport hostwire-tcp (as requested)" in done.stdout
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["train"]["transport"] == "hostwire-gloo"


@pytest.mark.long
def test_joins_ranks_that_torchrun_started(tmp_path):
    data = interactions(tmp_path / "events.parquet")
    command = ["--standalone", "--nproc-per-node"]
    where = ["--folder", tmp_path / "run", "--cache", tmp_path / "cache"]
    good = ["-m", "freescale", "train", "--data", data, *where, *SMALL, "--steps", 2]
    with torchrun(*command, 2, *good) as begun:
        done = begun.ended()
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())["ranks"] == 2
    where = ["--data", tmp_path / "nowhere.parquet", "--folder", tmp_path / "run2"]
    with torchrun(*command, 1, "-m", "freescale", "train", *where, *SMALL) as begun:
        done = begun.ended()
    assert done.returncode != 0 and "nowhere.parquet" in done.stderr
    assert not (tmp_path / "run2").exists()


def test_ranking(tmp_path):
    random = np.random.default_rng(1)
    labels = {
        "is_click": random.integers(0, 2, 480),
        "is_like": random.integers(0, 2, 480),
        "action": random.integers(0, 4, 480),
    }
    data = interactions(tmp_path / "events.parquet", **labels)
    balance = ["--balance", "variable", "--balance-adapt"]
    done = train(
        tmp_path,
        data,
        "--task",
        "ranking",
        "--labels",
        "is_click,is_like",
        "--nproc",
        2,
        "--epochs",
        2,
        *balance,
    )
    assert done.returncode == 0, done.stderr
    assert "error of the cost model" in done.stdout
    assert set(metrics(tmp_path)[-1]["test"]["model"]) == {
        f"{metric}/{label}" for metric in ("ne", "auc", "gauc") for label in ("is_click", "is_like")
    }
    (tmp_path / "b").mkdir()
    for column, word in (
        ("is_gold", "'is_gold'"),
        ("action", ("events.parquet: label column 'action' holds 3, not 0 or 1")),
    ):
        done = train(tmp_path / "b", data, "--task", "ranking", "--labels", column)
        check_refused(done, word, tmp_path / "b", prepared=True)


BAD_FILES = {
    "missing column": ({"item_id": None}, "--columns item=NAME"),
    "no user with two events": ({"user_id": np.arange(480)}, "no user has 2 or more events"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_one_line(name, tmp_path):
    changes, word = BAD_FILES[name]
    check_refused(
        train(tmp_path, interactions(tmp_path / "events.parquet", **changes), "--nproc", 2),
        word,
        tmp_path,
    )


def check_refused(
    done: subprocess.CompletedProcess, word: str, folder: Path, prepared: bool = False
) -> None:
    assert done.returncode not in (0, None)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("freescale: error: ") and word in lines[0], (
        done.stderr
    )
    assert not (folder / "run").exists()
    cache = folder / "cache"
    assert prepared or not cache.exists() or not list(cache.rglob("*.parquet")), (
        "something half-written stayed"
    )


def test_other_bad_input_is_one_line(tmp_path):
    good = interactions(tmp_path / "events.parquet")
    empty = tmp_path / "empty.parquet"
    empty.touch()
    check_refused(train(tmp_path, empty), "empty.parquet", tmp_path)
    no_rows = interactions(
        tmp_path / "none.parquet",
        user_id=np.zeros(0, int),
        item_id=np.zeros(0, int),
        timestamp=np.zeros(0, int),
    )
    check_refused(train(tmp_path, no_rows), "none.parquet", tmp_path)
    check_refused(train(tmp_path, tmp_path / "nowhere.parquet"), "nowhere.parquet", tmp_path)
    check_refused(train(tmp_path, good, "--num-items", 50), "num_items", tmp_path)
    check_refused(train(tmp_path, good, "--heads", 3), "--heads 3", tmp_path)
    check_refused(train(tmp_path, good, "--split", "time"), "--split-time", tmp_path)
    check_refused(
        train(tmp_path, good, "--temperature", 0), "--temperature must be above 0.0", tmp_path
    )
    check_refused(
        train(tmp_path, good, "--device", "cuda", "--nproc", 99),
        "--device cpu",
        tmp_path,
    )
    check_refused(freescale("train", "--resume"), "--resume needs --folder", tmp_path)
    check_refused(freescale("eval", tmp_path), "config.json", tmp_path)
    check_refused(
        freescale("export", tmp_path, "--out", tmp_path / "out"), "no checkpoint", tmp_path
    )


def test_a_port_in_use(tmp_path):
    data = interactions(tmp_path / "events.parquet")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = train(tmp_path, data, "--nproc", 2, "--port", port)
    assert done.returncode != 0 and f"port {port} is in use" in done.stderr
    assert not (tmp_path / "run").exists()


def test_errors_that_only_the_ranks_can_see(tmp_path):
    """A table larger than memory, and a run folder whose checkpoint is another model's: one line,
    from all ranks together."""
    data = interactions(tmp_path / "events.parquet")
    huge = train(tmp_path, data, "--nproc", 2, "--num-items", 10**11)
    errors = [line for line in huge.stderr.splitlines() if line.startswith("freescale: error:")]
    assert huge.returncode == 1 and len(errors) == 1 and "GiB free" in errors[0], huge.stderr
    assert not (tmp_path / "run").exists()
    second = tmp_path / "second"
    second.mkdir()
    assert train(second, data, "--steps", 1).returncode == 0
    other = freescale(
        "train", "--folder", second / "run", "--resume", "--nproc", 2, "--width", 16, "--steps", 3
    )
    errors = [line for line in other.stderr.splitlines() if line.startswith("freescale: error:")]
    assert (
        other.returncode == 1 and len(errors) == 1 and "checkpoint of another model" in errors[0]
    ), other.stderr


def test_unsorted_and_duplicate_timestamps_are_handled(tmp_path):
    """Documented: histories are sorted by time, equal times keep the order of the file."""
    times = np.random.default_rng(2).integers(0, 50, 480)
    path = interactions(tmp_path / "events.parquet", timestamp=times)
    done = train(tmp_path, path, "--steps", 2)
    assert done.returncode == 0, done.stderr
    (prepared,) = (tmp_path / "cache").rglob("histories.parquet")
    events = pq.read_table(path).to_pylist()
    for history in pq.read_table(prepared).to_pylist():
        # stable
        mine = sorted(
            (e for e in events if e["user_id"] == history["user_id"]), key=lambda e: e["timestamp"]
        )
        assert history["item_id"] == [e["item_id"] for e in mine]


def test_a_default_folder_is_the_same_on_all_ranks(tmp_path, monkeypatch):
    """Ranks that start in different seconds would otherwise write their parts of a checkpoint to
    different folders."""
    data = interactions(tmp_path / "events.parquet")
    monkeypatch.chdir(tmp_path)
    command = ["train", "--data", data, "--cache", tmp_path / "cache", *SMALL, "--steps", 1]
    port = find_free_port()
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            ranks.append(stack.enter_context(Begun(*command, **_joined(rank, port))))
            time.sleep(1.5)
        for rank in ranks:
            done = rank.ended(180)
            assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert freescale("eval", run, "--device", "cpu").returncode == 0


def test_users_with_too_few_events_are_an_error(tmp_path):
    events = 30
    few = {
        "user_id": np.arange(events) // 3,
        "item_id": np.arange(events) % 7,
        "timestamp": np.arange(events),
    }
    done = train(tmp_path, interactions(tmp_path / "events.parquet", **few))
    assert done.returncode == 1 and "needs users with 4 or more events" in done.stderr


def test_a_run_is_not_overwritten(tmp_path):
    data = interactions(tmp_path / "events.parquet")
    assert train(tmp_path, data, "--steps", 1).returncode == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    done = train(tmp_path, data, "--steps", 1)
    assert done.returncode != 0 and "already holds a run" in done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_free_port_is_none_that_a_connection_may_get():
    first = 32_768  # Linux's own setting; where somebody lowered it there may be no such port
    for port in {find_free_port() for _ in range(5)}:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
        assert port < first


def _joined(rank: int, port: int) -> dict[str, str]:
    """The environment of one of two ranks, as a cluster's launcher would set it."""
    joined = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    joined |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return joined


def _stepped(folder: Path) -> bool:
    path = folder / "run" / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") >= 2


ENDLESS = ["--epochs", "100000", "--checkpoint-every", "100000"]


def test_killed_rank_ends_the_run(tmp_path):
    data = interactions(tmp_path / "events.parquet")
    where = ["--folder", tmp_path / "run", "--cache", tmp_path / "cache"]
    with Begun("train", "--data", data, *where, "--nproc", 2, *SMALL, *ENDLESS) as launcher:
        wait_for(lambda: _stepped(tmp_path))
        children = launcher.ranks()
        assert len(children) == 2
        os.kill(children[1], signal.SIGKILL)
        done = launcher.ended(180)
    assert done.returncode == 1
    assert "killed by signal 9" in done.stderr
    if not Path("/dev/nvidiactl").exists():  # there the launcher ends the others before they notice
        assert "died or fell silent" in done.stderr
    assert "no sign of life from rank 1" in done.stderr
    assert all(not Path(f"/proc/{child}").exists() for child in children)
    # SIGTERM, which ends survivors too, saves only where all are there
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_killed_rank_is_noticed_without_a_launcher(tmp_path):
    """Ranks that nobody watches: the one that is left stops by itself, with an error, within a
    minute."""
    data = interactions(tmp_path / "events.parquet")
    port = find_free_port()
    where = ["--folder", tmp_path / "run", "--cache", tmp_path / "cache"]
    command = ["train", "--data", data, *where, *SMALL, *ENDLESS]
    with Begun(*command, **_joined(0, port)) as left, Begun(*command, **_joined(1, port)) as lost:
        wait_for(lambda: _stepped(tmp_path))
        os.kill(lost.pid, signal.SIGKILL)
        done = left.ended(180)
    assert done.returncode == 1 and "died or fell silent" in done.stderr


def test_bench_kernels(tmp_path):
    """Tiny, through the interpreter: every column of the table has something in it, and so has the
    file."""
    pytest.importorskip("triton", reason="exists for Linux alone")
    output = tmp_path / "kernels.json"
    done = started("bench", "kernels", "--device", "cpu", "--only", "pieces", "--output", output)
    assert done.returncode == 0, done.stderr
    assert "gated norm" in done.stdout and "TB/s" in done.stdout and str(output) in done.stdout
    result = json.loads(output.read_text())
    assert {"machine", "versions", "ceilings", "rows", "date"} <= set(result)
    for row in result["rows"]:
        assert (
            row["ms"]["median"] > 0
            and row["rate"] > 0
            and row["ceiling_percent"] > 0
            and row["faster"] > 0
        ), row
    nowhere = freescale(
        "bench", "kernels", "--device", "cpu", "--output", tmp_path / "no" / "file.json"
    )
    assert (
        nowhere.returncode == 1
        and "no folder" in nowhere.stderr
        and "Traceback" not in nowhere.stderr
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_kernels_without_a_gpu():
    done = freescale("bench", "kernels")
    assert done.returncode == 1 and "--device cpu" in done.stderr and "Traceback" not in done.stderr


def test_doctor():
    done = freescale("doctor")
    assert done.returncode == 0, done.stderr
    for word in (
        "torch",
        "gloo",
        "nccl",
        "rdma",
        "ucx",
        "shared memory",
        "transport",
        "triton",
        "would run",
    ):
        assert word in done.stdout
