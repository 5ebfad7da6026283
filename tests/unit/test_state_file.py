"""Memory files that are brought up to date in place: they hold what a file made anew would, and one
that is half written or damaged is refused, however often it was written before."""

from __future__ import annotations

import os

import pytest
import torch

from freescale.train.state import snapshots
from freescale.train.state.disk import Damaged
from freescale.train.state.holder_link import is_supported
from freescale.train.state.memory import Segment, StateFile
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory files are Linux's")


def draw_tables():
    maker = torch.Generator().manual_seed(0)
    return {
        "table/item/rows": torch.randn(3000, 16, generator=maker),
        "table/item/sum": torch.rand(3000, generator=maker),
        "table/action/rows": torch.randn(7, 3, generator=maker).half(),
    }


def write_whole(file, tables, beside):
    file.begin()
    for name, value in tables.items():
        file.reserve({name: value})  # as tables of several placements come
        file.fill(name, value)
    return file.seal({"step": 0}, beside)


def change(tables, file, seed, packed=False):
    """A third of the rows of each table."""
    file.begin()
    maker = torch.Generator().manual_seed(seed)
    for name, value in tables.items():
        rows = torch.randperm(len(value), generator=maker)[: len(value) // 3 + 1].sort().values
        value[rows] = torch.randn(value[rows].shape, generator=maker).to(value.dtype)
        file.replace(name, rows, value[rows] if packed else value, packed)


@pytest.fixture
def file():
    made = StateFile("snapshots/0")
    yield made
    made.close()


def test_a_file_holds_what_was_written_last(file):
    tables = draw_tables()
    assert not file.current
    write_whole(file, tables, {"rest/weight": torch.ones(90_000)}).close()
    for step in range(1, 6):
        assert file.current
        change(tables, file, step, packed=step % 2 == 0)
        assert not file.current
        beside = {"rest/weight": torch.full((step,), float(step))}  # shorter than before
        segment = file.seal({"step": step}, beside)
        found = Segment.open(segment.file, "it")
        assert found.header["step"] == step and found.size == segment.size
        tensors = found.verify("it")
        assert tensors.keys() == tables.keys() | beside.keys()
        for name, value in (tables | beside).items():
            assert torch.equal(tensors[name], value)
        found.close()


def test_snapshots_need_a_compiler(monkeypatch):
    monkeypatch.setattr(snapshots, "load_native", lambda: None)
    with pytest.raises(ValueError, match="--snapshot-every needs a C compiler"):
        snapshots.Snapshots(LocalTransport(), 5)


def test_a_copy_lacks_only_what_changes_afterwards(file):
    tables, other = draw_tables(), StateFile("snapshots/1")
    write_whole(file, tables, {}).close()
    other.copy_tables(file)
    assert other.current
    change(tables, other, 1)
    segment = other.seal({"step": 1}, {})
    found = segment.verify("it")
    assert all(torch.equal(found[name], value) for name, value in tables.items())
    segment.close()
    other.close()


def test_a_buddy_s_files_follow_those_of_a_rank(file):
    """Each has two, which are updated in turn; the second ones begin as copies. A file receives
    what has changed since its own step."""
    rows, label = torch.randn(500, 3), "table/item/rows"
    spare, *copies = StateFile("snapshots/1"), StateFile("snapshots/0"), StateFile("snapshots/1")
    files, history = [file, spare], {0: rows.clone()}
    write_whole(file, {label: rows}, {}).close()
    spare.copy_tables(file)
    since, sent = None, {label: rows.clone()}
    for step in range(1, 7):
        rest = copies[0].update(since, sent, copies[1])
        segment = copies[0].seal({"step": step - 1}, rest)
        assert torch.equal(segment.verify("it")[label], rows)
        assert rest.keys() == (set() if step == 1 else {"rest/weight"})
        segment.close()
        files.reverse()
        copies.reverse()
        rows[step : step + 150 : step] = torch.randn(3)
        history[step], since = rows.clone(), files[0].step
        assert since == max(0, step - 2)
        changed = (rows != history[since]).any(1).nonzero().view(-1)
        files[0].begin()
        files[0].replace(label, changed, rows)
        files[0].seal({"step": step}, {}).close()
        sent = {"changed/item/positions": changed.int(), "changed/item/rows": rows[changed]}
        sent["rest/weight"] = torch.ones(3)
    for each in (*files, *copies):
        each.close()


def test_changes_since_another_step_are_refused(file):
    tables = draw_tables()
    write_whole(file, tables, {}).close()
    copy = StateFile("snapshots/1")
    with pytest.raises(Damaged, match="changes since step 7 do not fit tables of step 0"):
        copy.update(7, {}, file)
    copy.close()


def test_a_file_that_is_being_written_is_no_state(file):
    tables = draw_tables()
    held = write_whole(file, tables, {})  # as the holder has it
    Segment.open(os.dup(held.file), "it").close()
    change(tables, file, 1)
    with pytest.raises(Damaged, match="half written"):
        Segment.open(os.dup(held.file), "it")
    file.seal({"step": 1}, {}).close()
    assert Segment.open(held.file, "it").header["step"] == 1


@pytest.mark.parametrize("name", list(draw_tables()))
def test_damage_is_found_also_where_rows_are_replaced_afterwards(file, name):
    """Whatever the next snapshot writes, the sums are of what it should have found."""
    tables = draw_tables()
    write_whole(file, tables, {}).close()
    change(tables, file, 1)
    bits = file.tables[name].view(-1).view(torch.uint8)
    bits[1 + len(bits) // 2] ^= 4
    segment = file.seal({"step": 1}, {})
    with pytest.raises(Damaged, match=f"the checksum of {name} does not match"):
        segment.verify("it")
    segment.close()


def test_a_state_that_does_not_fit_is_refused(file, monkeypatch):
    from freescale.train.state import memory as segment

    monkeypatch.setattr(segment, "get_available_memory", lambda device: 100)
    with pytest.raises(OSError, match="does not fit into the host's memory"):
        file.reserve(draw_tables())
    assert not file.tables
