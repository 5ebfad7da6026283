"""The holder and its memory files: they outlive who wrote them, and end with the holder; a file
that is half written or damaged is refused."""

from __future__ import annotations

import os
import secrets
import time

import pytest
import torch

from freescale.train.state.disk import Damaged
from freescale.train.state.holder_link import (
    RUN_ID,
    HolderLink,
    end_holder,
    is_supported,
    name_holder,
)
from freescale.train.state.memory import Segment, sum_tensor, write_segment

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory files are Linux's")


@pytest.fixture
def name():
    made = f"freescale-holder-test-{secrets.token_hex(8)}"
    yield made
    if (link := HolderLink.connect(made)) is not None:
        link.end()


def is_gone(process, seconds=120.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_files_outlive_their_writer_and_end_with_the_holder(name, tmp_path):
    writer = os.fork()
    if writer == 0:  # in a process of its own, which dies
        segment = write_segment({"step": 3}, {"rows": torch.arange(5.0)})
        HolderLink.start(name).put("2/0/3/whole", segment.file)
        os._exit(0)
    os.waitpid(writer, 0)
    link = HolderLink.start(name)
    other = HolderLink.start(name)  # the same
    assert link.process == other.process
    assert other.list() == ["2/0/3/whole"]
    segment = Segment.open(other.get("2/0/3/whole"), "it")
    assert segment.header["step"] == 3
    assert torch.equal(segment.verify("it")["rows"], torch.arange(5.0))
    assert other.get("2/0/4/whole") is None
    other.drop(["2/0/3/whole", "2/0/9/whole"])
    assert link.list() == []
    process = link.process
    link.end()
    assert is_gone(process)
    with pytest.raises(OSError, match="ended|[Bb]roken|reset"):
        other.list()


def test_it_stays_for_who_comes_back(name):
    link = HolderLink.start(name)
    process = link.process
    link.close()
    again = HolderLink.connect(name)
    assert again is not None and again.process == process


def test_it_ends_when_nobody_comes_back(name):
    link = HolderLink.start(name, patience=1.0)  # it starts to count before we are there
    process = link.process
    time.sleep(1.2)
    assert link.list() == []  # it stays: somebody is there
    link.close()
    assert is_gone(process)


def test_a_launcher_ends_the_holder_of_a_run(tmp_path):
    run, machine = secrets.token_hex(8), b"machine"
    end_holder(tmp_path, machine)  # a folder without a run
    (tmp_path / RUN_ID).write_text(run)
    end_holder(tmp_path, machine)  # a run without a holder
    link = HolderLink.start(name_holder(run, machine))
    end_holder(tmp_path, machine)
    assert is_gone(link.process)


def test_every_change_of_a_word_changes_the_checksum():
    value = torch.randint(0, 256, (3 * 32768 + 13,), dtype=torch.uint8)
    known = sum_tensor(value)
    for place in (0, 7, 32768, 65537, 98303, 98304, len(value) - 1):
        changed = value.clone()
        changed[place] ^= 1 << (place % 8)
        assert sum_tensor(changed) != known
    swapped = value.clone()
    swapped[:8], swapped[8:16] = value[8:16], value[:8]
    assert sum_tensor(swapped) != known


def test_what_is_half_written_or_damaged_is_refused():
    for damage, words in (
        (lambda segment: os.pwrite(segment.file, bytes(8), 0), "half written"),
        (lambda segment: os.ftruncate(segment.file, segment.size - 1), "half written"),
        (lambda segment: os.pwrite(segment.file, b"x", segment.size - 3), "half written"),
        (lambda segment: os.pwrite(segment.file, b"x", 64 + 5), "checksum of rows"),
    ):
        segment = write_segment({}, {"rows": torch.arange(5.0), "none": torch.empty(0)})
        damage(segment)
        with pytest.raises(Damaged, match=f"it is .*{words}"):
            Segment.open(os.dup(segment.file), "it").verify("it")
        segment.close()
