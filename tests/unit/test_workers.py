"""Batches from worker processes against those that the source makes itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers.loading import load_histories
from helpers.worker_processes import (
    LARGE,
    Counting,
    read_children,
    read_parent,
    read_workers,
    wait_for_end,
)

from freescale.batch import SequenceBatch
from freescale.data import generate
from freescale.data.batches.workers import WorkerLoader, read_ahead
from freescale.worker_server import WorkerServer, choose_workers


@pytest.fixture(scope="module")
def histories(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("workers") / "h.parquet"
    generate(path, users=60, items=50, median=9, cap=30)
    return path


def are_equal(batch: SequenceBatch, other: SequenceBatch) -> bool:
    spans, others = (
        {name: part.span for name, part in b.sequences.items()} for b in (batch, other)
    )
    return (
        batch.number == other.number
        and spans == others
        and batch.parts().keys() == other.parts().keys()
        and batch.shared.keys() == other.shared.keys()
        and all(
            a.dtype == b.dtype and torch.equal(a, b)
            for a, b in zip(batch.tensors(), other.tensors(), strict=True)
        )
    )


def test_workers_know_the_bounds_of_ids(histories):
    """They are those of the values; nobody reads these again."""
    with WorkerLoader(load_histories(histories, 8, count=5), 1) as loader:
        loader.wait_until_up()
        batch = next(loader)
    for name in ("history", "targets", "negatives"):
        values = batch.values(name)
        assert batch.find_bounds(values) == (int(values.min()), int(values.max()))
        assert batch.find_bounds(values.clone()) == (int(values.min()), int(values.max()))
    values.fill_(7)
    assert batch.find_bounds(values) != (7, 7) == batch.find_bounds(values.clone())
    assert batch.map(torch.clone).find_bounds(values) == (7, 7)


def test_workers_make_the_batches_that_the_source_makes(histories):
    """From the middle of a run; all are kept, more than there are slots for."""
    options = {"count": 5, "per": "batch", "in_batch_share": 0.4, "epochs": 4}
    source, alone = (
        load_histories(histories, 8, start=9, rank=1, world=2, **options) for _ in range(2)
    )
    with WorkerLoader(source, 2) as loader:
        loader.wait_until_up()
        batches = list(loader)
        assert loader.made_here == 0
    expected = list(alone)  # the workers have ended: their memory has not
    assert len(batches) == len(expected) == 32 - 9
    assert all(map(are_equal, batches, expected))
    assert 6 <= sum(batch.packing.lease is not None for batch in batches) < len(batches)


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_make_batches_without_samples(histories, rank):
    """A batch of one sample leaves one of two ranks nothing, from the first batch on."""
    source = load_histories(histories, 1, count=5, rank=rank, world=2)
    with WorkerLoader(source, 1) as loader:
        loader.wait_until_up()
        made = [next(loader) for _ in range(5)]
        assert loader.made_here == 0
    assert all(are_equal(batch, source.batch(batch.number)) for batch in made)
    assert {len(batch) for batch in made} == {rank}


def test_slots_are_used_again_once_their_tensors_are_gone():
    """Batches do not wait for a worker to start: the first are made here, and none of those that
    follow is left out or comes twice. One is larger than a slot."""
    source = Counting(1 << 30)
    with WorkerLoader(source, 1) as loader:
        number, addresses = 0, set()
        while loader.made_here == number:
            assert are_equal(next(loader), source.batch(number))
            number += 1
            time.sleep(0.01)
        assert number > 3
        for place in range(number, number + 60):
            batch = next(loader)
            assert are_equal(batch, source.batch(place))
            if batch.packing is not None:
                addresses.add(batch.packed.data_ptr())
                kept = batch.sequences["history"].values  # alone keeps the slot
        assert torch.equal(kept, batch.sequences["history"].values)
        assert loader.made_here < number + 30 and len(addresses) <= 8 + 60 // LARGE + 1
    assert read_children() == []


def test_an_error_in_a_worker_is_raised_with_its_traceback():
    with WorkerLoader(Counting(20, fails=4), 1) as loader:
        loader.wait_until_up()
        assert [next(loader).number for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="batch 4 is broken") as raised:
            next(loader)
        assert "in a data worker" in raised.value.__notes__[0]
        assert "in batch\n" in raised.value.__notes__[0]
    assert read_children() == []


@pytest.mark.parametrize("sigchld", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
def test_a_killed_worker_is_an_error(sigchld):
    """Whatever the trainer's parent does with SIGCHLD: who ignores it gets no exit status."""
    ours = signal.signal(signal.SIGCHLD, sigchld)
    try:
        server = WorkerServer()
    finally:
        signal.signal(signal.SIGCHLD, ours)
    with closing(server), WorkerLoader(Counting(1 << 30), 2, server=server) as loader:
        loader.wait_until_up()
        for worker in read_workers():
            os.kill(worker, signal.SIGTERM)  # ignored: the trainer decides
        taken = [next(loader).number for _ in range(20)]
        assert taken == list(range(20))
        assert len(read_workers()) == 2
        os.kill(read_workers()[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="data worker . was killed by signal 9"):
            for _ in range(30):
                next(loader)
    assert read_children() == []


def test_batches_do_not_wait_for_the_server():
    """It is stopped while it comes up: all batches are made here, and nobody waits for its end."""
    source, server = Counting(1000), WorkerServer()
    os.kill(server.pid, signal.SIGSTOP)
    with WorkerLoader(source, 1, server=server) as loader:
        assert all(are_equal(batch, source.batch(n)) for n, batch in enumerate(loader))
        assert loader.made_here == 1000
    server.close()
    assert read_children() == [] and not server.is_open


def test_a_server_that_ends_is_an_error():
    """Before it has forked a worker; with workers, they go on without it."""
    server = WorkerServer()
    with WorkerLoader(Counting(1 << 30), 1, server=server) as loader:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="data worker 0 was killed by signal 9"):
            loader.wait_until_up()
    server.close()
    with WorkerLoader(Counting(1 << 30), 1) as loader:
        loader.wait_until_up()
        (worker,) = read_workers()
        os.kill(read_parent(worker), signal.SIGKILL)
        assert [next(loader).number for _ in range(50)] == list(range(50))
    with pytest.raises(ProcessLookupError):
        wait_for_end(worker)


def test_a_server_forks_the_workers_of_one_loader_after_another():
    with closing(WorkerServer()) as server:
        before: list[int] = []
        for start in (0, 7):
            with WorkerLoader(Counting(40, start=start), 2, server=server) as loader:
                loader.wait_until_up()
                assert [batch.number for batch in loader] == list(range(start, 40))
                workers = read_workers()
                assert len(workers) == 2 and not set(workers) & set(before)
                before = workers
    assert read_children() == []


def test_workers_end_with_the_trainer(tmp_path):
    """However it ends."""
    told = tmp_path / "workers"
    program = (
        f"import os, signal, sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]\n"
        "from freescale.data.batches.workers import WorkerLoader\n"
        "from helpers.worker_processes import Counting, read_children\n"
        "loader = WorkerLoader(Counting(1 << 30), 2)\n"
        "loader.wait_until_up()\n"
        f"open({str(told)!r}, 'w').write(' '.join(map(str, read_children())))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    left = list(map(int, told.read_text().split()))
    assert len(left) == 3
    for process in left:
        with pytest.raises(ProcessLookupError):
            wait_for_end(process)


def test_without_workers_a_thread_reads():
    with read_ahead(Counting(9, start=2), 0, pin=False) as batches:
        assert [batch.number for batch in batches] == list(range(2, 9))
    with WorkerLoader(Counting(2, start=2), 1) as loader:
        assert list(loader) == []


def test_choice_of_workers():
    assert choose_workers(3, "cpu", 1, 1) == 3
    assert choose_workers(None, "cpu", 64, 1) == 0
    assert [choose_workers(None, "cuda", cores, 4) for cores in (2, 8, 16, 64)] == [0, 1, 3, 8]
