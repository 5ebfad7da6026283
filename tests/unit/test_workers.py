"""Batches from worker processes against those that the source makes itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from freescale.batch import Jagged, SequenceBatch
from freescale.data import Histories, generate
from freescale.data.workers import WorkerLoader, choose_workers, read_ahead

LARGE = 25  # every so many batches


class Counting:
    """A source of small batches, except for those that are asked to be otherwise."""

    def __init__(self, stop: int, start: int = 0, fails: int = -1) -> None:
        self.start, self.stop, self.fails = start, stop, fails

    def batch(self, number: int) -> SequenceBatch:
        if number == self.fails:
            raise ValueError(f"batch {number} is broken")
        size = 1 << 17 if number % LARGE == LARGE - 1 else 3
        values = torch.arange(number, number + size)
        return SequenceBatch(
            {"history": Jagged(values, torch.tensor([size]), span=size - 1)},
            weights={"t": torch.ones(1)},
            number=number,
            shared={"negatives": values[:2] * 2},
        )


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


def test_workers_make_the_batches_that_the_source_makes(histories):
    """From the middle of a run; all are kept, more than there are slots for."""
    options = {"negatives": 5, "negatives_per": "batch", "in_batch_share": 0.4, "epochs": 4}
    source, alone = (Histories(histories, 8, start=9, rank=1, world=2, **options) for _ in range(2))
    with WorkerLoader(source, 2) as loader:
        loader.wait_until_up()
        batches = list(loader)
        assert loader.made_here == 0
    expected = list(alone)  # the workers have ended: their memory has not
    assert len(batches) == len(expected) == 32 - 9
    assert all(map(are_equal, batches, expected))
    assert 6 <= sum(batch.packing.lease is not None for batch in batches) < len(batches)


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


def test_a_killed_worker_is_an_error():
    with WorkerLoader(Counting(1 << 30), 1) as loader:
        loader.wait_until_up()
        os.kill(read_children()[0], signal.SIGTERM)  # ignored: the trainer decides
        taken = [next(loader).number for _ in range(20)]
        assert taken == list(range(20))
        os.kill(read_children()[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="data worker . was killed by signal 9"):
            for _ in range(30):
                next(loader)
    assert read_children() == []


def test_without_workers_a_thread_reads():
    with read_ahead(Counting(9, start=2), 0, pin=False) as batches:
        assert [batch.number for batch in batches] == list(range(2, 9))
    with WorkerLoader(Counting(2, start=2), 1) as loader:
        assert list(loader) == []


def test_choice_of_workers():
    assert choose_workers(3, "cpu", 1, 1) == 3
    assert choose_workers(None, "cpu", 64, 1) == 0
    assert [choose_workers(None, "cuda", cores, 4) for cores in (2, 8, 16, 64)] == [0, 1, 3, 8]


def read_children() -> list[int]:
    """Data workers that this process has started and not waited for; other tests of the process
    may have children of their own."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        found += (task / "children").read_text().split()
    named = [pid for pid in found if b"worker_process" in _read_command(pid)]
    return sorted(map(int, named))


def _read_command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
