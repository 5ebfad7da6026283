"""Tables whose home is host memory or a disk: the same bits as tables on the device, by every
schedule and row optimizer, with caches so small that every step evicts."""

from __future__ import annotations

import itertools
import mmap
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.cache_copies import check_copies
from helpers.collisions import ITEMS, batch_of, build, colliding, state_of
from helpers.snapshots import TakenSnapshots
from helpers.toys import Clicks

import freescale
from freescale.embedding.host_tables import copies, plan
from freescale.embedding.host_tables.homes import find_pages
from freescale.embedding.host_tables.tiers import Disk, Host, format_bytes, parse_bytes
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.embedding.placement import Placement, move_to_host, parse_placement
from freescale.launch.ranks import Ended
from freescale.pipeline.single import Single
from freescale.pipeline.staged import Staged
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.contents import follow_changes
from freescale.transport.local import LocalTransport

STREAM = colliding(0.3, steps=8)
# Rows that skip a batch or several, and come back: out of the cache, and after it was written back.
RETURNING = [[(i + 40 * (step % 5)) % 200 for i in range(40)] for step in range(12)]
WIDTH = 8  # bytes of a value
LEAST = 120  # rows: three batches of at most 40


def bytes_of(rows, optimizer="adagrad", width=4):
    shapes = ROW_OPTIMIZERS[optimizer]().state_shapes(width).values()
    return rows * WIDTH * (width + sum(torch.Size(shape).numel() for shape in shapes))


def batches_of(stream):
    return [batch_of(ids, number) for number, ids in enumerate(stream)]


def train(schedule, stream=STREAM, **options):
    parallel, pipeline = build(LocalTransport(), schedule, **options)
    losses = [result.loss for result in pipeline.run(batches_of(stream))]
    return losses, state_of(parallel)


def assert_same(actual, expected):
    assert actual[0] == expected[0] and len(expected[0]) > 0
    pairs = ((name, actual[1][name], value) for name, value in expected[1].items())
    assert [name for name, ours, value in pairs if not torch.equal(ours, value)] == []


def item_width():
    parallel, _ = build(LocalTransport(), "serial")
    return parallel.tables.specs["item"].width


def place(rows, optimizer="adagrad", folder=None):
    cache = bytes_of(rows, optimizer, item_width())
    tier = Host(cache) if folder is None else Disk(str(folder), cache)
    return {"item": tier, "action": "sharded"}


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_bit_equal_to_tables_on_the_device(optimizer, tmp_path):
    for stream in (STREAM, RETURNING):
        expected = train("serial", stream, optimizer=optimizer)
        for schedule, rows, folder in (
            ("serial", LEAST, None),
            (Staged, LEAST, None),
            ("staged", 150, None),  # of one rank: single.py
            (Staged, 200, tmp_path),
            ("staged", ITEMS, tmp_path),
        ):
            placement = place(rows, optimizer, folder)
            found = train(schedule, stream, optimizer=optimizer, placement=placement)
            assert_same(found, expected)
    assert list(tmp_path.iterdir()) == []  # the files have no names


def test_without_pins_the_staged_schedule_loses_updates(monkeypatch):
    """The control: rows leave while their gradients are on the way, and the comparison sees it."""
    monkeypatch.setattr(plan, "PINNED", 1)
    expected = train("serial", RETURNING)
    losses, state = train(Staged, RETURNING, placement=place(60))
    assert not torch.equal(state["item/rows"], expected[1]["item/rows"]) or losses != expected[0]


def test_serial_and_staged_make_the_same_decisions():
    """Also with evaluations between steps, which read past the cache."""
    found = []
    for schedule, evaluates in (("serial", False), (Staged, False), ("staged", True)):
        parallel, pipeline = build(LocalTransport(), schedule, placement=place(130))
        for _ in pipeline.run(batches_of(RETURNING)):
            if evaluates:
                with parallel.reading(batches_of(STREAM)[0]) as batch:
                    parallel(batch)
        pipeline.close()
        contents = parallel.tables.get_group("item").rows.contents
        found.append((contents.row_of.tolist(), contents.last_use.tolist()))
    assert found[0] == found[1] == found[2]
    assert min(found[0][1]) > 0  # rows of the first batch have left


def test_rows_of_a_single_rank_are_brought_beside_its_compute(monkeypatch, tmp_path):
    """As on a GPU, where the following batch is taken before the step."""
    monkeypatch.setattr(Single, "_ahead", True)
    expected = train("serial", RETURNING, accumulate=2)
    parallel, pipeline = build(LocalTransport(), "staged", placement=place(LEAST), accumulate=2)
    checkpoints = Checkpoints(tmp_path, LocalTransport(), full_every=2, asynchronous=True)
    source, losses = iter(batches_of(RETURNING)), []
    for until in (4, 12):  # the first run leaves with the next batch on its way
        for result in pipeline.run(source):
            losses.append(result.loss)
            checkpoints.save(parallel, pipeline.optimizer, {"step": result.step})
            with parallel.reading(batches_of(STREAM)[0]) as batch:
                parallel(batch)
            if result.step == until:
                break
    checkpoints.wait()
    spans = {span[0] for record in pipeline.ledger.drain() for span in record["spans"]}
    assert {"arrive", "ahead/make resident"} <= spans
    pipeline.close()
    assert_same((losses, state_of(parallel)), expected)
    restored, other = build(LocalTransport(), "serial")
    checkpoints.load(checkpoints.latest(), restored, other.optimizer)
    assert_same((losses, state_of(restored)), expected)


def test_hits_and_bytes_are_counted():
    parallel, pipeline = build(LocalTransport(), Staged, placement=place(130))
    list(pipeline.run(batches_of(RETURNING)))
    records = pipeline.ledger.drain()
    total = {
        name: sum(record["counters"].get(f"cache_{name}", 0) for record in records)
        for name in ("wanted", "missed", "bytes_up", "bytes_down")
    }
    contents = parallel.tables.get_group("item").rows.contents
    row = bytes_of(1, width=item_width())
    assert total["wanted"] == sum(len(set(ids)) for ids in RETURNING)
    assert total["bytes_up"] == total["missed"] * row
    assert total["bytes_down"] == (total["missed"] - contents.filled) * row > 0


OTHER = {"host": 140, "disk": 160, "sharded": None}


def placed_as(kind, folder):
    if OTHER[kind] is None:
        return "sharded"
    return place(OTHER[kind], "adam", folder if kind == "disk" else None)


@pytest.mark.parametrize("schedule", ["serial", Staged, "staged"])
def test_checkpoints_evaluation_and_resume_in_another_placement(schedule, tmp_path):
    """Full and differential, written beside training; each is taken up by another placement."""
    expected = train("serial", RETURNING, optimizer="adam")
    batches, losses, progress = batches_of(RETURNING), [], None
    for number, kind in enumerate(("host", "disk", "sharded", "host")):
        parallel, pipeline = build(
            LocalTransport(), schedule, optimizer="adam", placement=placed_as(kind, tmp_path)
        )
        checkpoints = Checkpoints(
            tmp_path / "run", LocalTransport(), keep=9, full_every=3, asynchronous=number % 2 == 0
        )
        if progress is not None:
            progress = checkpoints.load(checkpoints.latest(), parallel, pipeline.optimizer)
            pipeline.load_state_dict(progress["pipeline"])
        for result in pipeline.run(batches[pipeline.steps :]):
            losses.append(result.loss)
            with parallel.reading(batches[0]) as batch:
                parallel(batch)
            progress = {"step": result.step, "pipeline": pipeline.state_dict()}
            checkpoints.save(parallel, pipeline.optimizer, progress)
            if result.step == 3 * (number + 1):
                break
        checkpoints.wait()
        assert any("parent" in checkpoint for checkpoint in list_states(checkpoints))
    assert_same((losses, state_of(parallel)), expected)


def list_states(checkpoints):
    return [(checkpoints.path(step) / "state.json").read_text() for step in checkpoints.steps()]


def test_going_back_to_a_checkpoint_within_a_run(tmp_path):
    """The tables are replaced while rows of the next batch are resident."""
    found = []
    for schedule, placement in ((Staged, place(130, "adam")), ("serial", "sharded")):
        parallel, pipeline = build(
            LocalTransport(), schedule, optimizer="adam", placement=placement
        )
        checkpoints, losses = Checkpoints(tmp_path / str(placement)[:9], LocalTransport()), []
        for result in pipeline.run(batches_of(RETURNING)):
            losses.append(result.loss)
            if result.step == 3:
                checkpoints.save(parallel, pipeline.optimizer, {"step": 3})
            if result.step == 6:
                checkpoints.load(checkpoints.latest(), parallel, pipeline.optimizer)
        found.append((losses, state_of(parallel)))
    assert_same(*found)


def test_snapshots_are_taken_and_restored():
    """A whole one and the changes since, with marks of another consumer, into a cache in use."""
    parallel, pipeline = build(
        LocalTransport(), Staged, optimizer="adam", placement=place(130, "adam")
    )
    taken = TakenSnapshots()
    for result in pipeline.run(batches_of(RETURNING)):
        if result.step in (3, 6):
            taken.take(parallel, pipeline.optimizer, result.step)
            follow_changes(parallel.tables, "others")
            saved = state_of(parallel)
    for tensors in (taken.copied, taken.own):
        taken.load(tensors, parallel, pipeline.optimizer)
        restored = state_of(parallel)
        assert [name for name in saved if not torch.equal(restored[name], saved[name])] == []
        list(pipeline.run(batches_of(RETURNING)))  # something else is there
    taken.load(taken.own, parallel, pipeline.optimizer)
    storage = parallel.tables.get_group("item").rows
    rows = storage.contents.row_of
    assert torch.equal(storage.weight[: len(rows)], storage.get_tensors("item")["rows"][rows])
    assert set(storage.changed.consumers) == {"snapshots/0", "others"}
    assert storage.changed.find("others", slice(None)).numel() > 0


# ---- what users say and see


def test_sizes():
    assert [parse_bytes(size) for size in ("8GB", "512MiB", "1.5 kB", 7, "3gb")] == [
        8 * 10**9,
        512 << 20,
        1500,
        7,
        3 * 10**9,
    ]
    assert [format_bytes(size) for size in (8 * 10**9, 1_500_001, 999)] == [
        "8 GB",
        "1.6 MB",
        "999 B",
    ]
    for wrong in ("much", "-1GB", ""):
        with pytest.raises(ValueError, match="is not a size"):
            Host(wrong)


def test_placements():
    found = parse_placement(
        {"a": "host:8GB", "b": "disk:/fast:ssd:1GB", "c": "host:8GB:direct", "d": "auto"},
        list("abcd"),
    )
    assert {name: placed.tier for name, placed in found.items()} == {
        "a": Host("8GB"),
        "b": Disk("/fast:ssd", "1GB"),
        "c": Host("8GB", direct=True),
    }
    assert parse_placement({"a": Host("1GB")}, ["a"])["a"].tier == Host("1GB")
    assert str(found["b"]) == "sharded, disk /fast:ssd, cache 1 GB (as requested)"
    assert freescale.Host is Host and freescale.Disk is Disk
    for wrong, words in (
        ("host", "needs the size of its cache"),
        ("host:lots", "'lots' is not a size"),
        ("host:8GB:fast", "may come 'direct', not 'fast'"),
        ("disk:8GB", "must name a folder"),
        ("ssd", "must be auto, sharded, replicated, host:CACHE or disk:FOLDER:CACHE"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_placement({"a": wrong}, ["a"])


def test_what_the_page_shows(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how" / "host_tables.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line, kind in zip(snippet.splitlines(), (Host, Disk), strict=True):
        names = {"freescale": freescale, "transport": LocalTransport()}
        names |= {"model": Clicks(), "ids": Clicks.ids}
        exec(line.replace("/local/ssd", str(tmp_path)), names)
        tables = names["sharded"].tables
        tables.place()
        assert isinstance(tables.placements["item"].tier, kind)


def test_tables_that_do_not_fit_move_to_the_host():
    sharded = Placement("sharded", "")
    placements = {"small": sharded, "large": sharded, "kept": sharded}
    sizes = {"small": 10, "large": 100, "kept": 20}
    assert move_to_host(placements, sizes, 130) == placements
    moved = move_to_host(placements, sizes, 80, fixed=["kept"])
    assert moved["small"] == moved["kept"] == sharded
    assert moved["large"].tier == Host(25)  # half of what the others leave
    words = "tables need 130 B of a rank's GPU, 80 B are free; this one needs 100 B"
    assert moved["large"].reason == words
    assert move_to_host(placements, sizes, 15, fixed=["kept"]) == placements  # refused elsewhere


def test_a_cache_too_small_names_the_least_size():
    for schedule in ("serial", Staged, "staged"):
        _, pipeline = build(LocalTransport(), schedule, placement=place(100))
        with pytest.raises(ValueError) as error:
            list(pipeline.run(batches_of(RETURNING)))
        need = format_bytes(bytes_of(120, width=item_width()))
        assert f"3 consecutive batches read 120 rows: give it at least {need}" in str(error.value)
        assert "table 'item': the cache holds 100 rows" in str(error.value)


def test_a_folder_that_cannot_hold_the_rows(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    parallel, _ = build(LocalTransport(), "serial", placement=f"disk:{tmp_path}/file:1MB")
    with pytest.raises(ValueError, match="cannot be had in .*file"):
        parallel.tables.place()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    parallel, _ = build(LocalTransport(), "serial", placement=f"disk:{tmp_path}:1MB")
    with pytest.raises(ValueError, match="No space left on device.*larger disk"):
        parallel.tables.place()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("shape", [(7,), (8,), ()], ids=["rows", "wide", "one value a row"])
def test_copies_in_pieces(shape, monkeypatch):
    """Those for a GPU, in plain memory: more pieces than buffers, none, and one."""
    empty = torch.empty
    monkeypatch.setattr(copies.torch, "empty", lambda size, dtype, **_: empty(size, dtype=dtype))
    monkeypatch.setattr(copies, "record_event", lambda **_: object())
    monkeypatch.setattr(copies, "wait_for_event", lambda event: None)
    monkeypatch.setattr(copies, "_BUFFER_BYTES", 256)
    check_copies(copies.PinnedCopies(8 * 4), shape, "cpu")
    check_copies(copies.HostCopies(), shape, "cpu")
    stream = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr(copies, "new_stream", lambda device: stream)
    monkeypatch.setattr(copies.torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(copies.triton_row_copies, "copy_rows", copies.copy_rows)
    check_copies(copies.DirectCopies(8 * 4, torch.device("cpu")), shape, "cpu")


def test_pages_of_rows():
    """Against a set of the pages of every byte."""
    page, rows = mmap.PAGESIZE, np.array([0, 1, 5, 40, 41, 100, 400])
    for offset, width in ((0, 512), (100, 4), (page - 4, 1000), (3 * page, 5000), (8, 3 * page)):
        bytes_of_rows = (
            (offset + row * width + at) for row in rows.tolist() for at in range(width)
        )
        expected = {byte // page for byte in bytes_of_rows}
        runs = find_pages(rows, offset, width)
        found = [number for first, last in runs for number in range(first, last + 1)]
        assert found == sorted(expected)
        assert all(after > last + 1 for (_, last), (after, _) in itertools.pairwise(runs))
    assert find_pages(rows[:0], 0, 512) == []


def test_a_file_cut_short_is_named():
    assert (
        "rank 1 was killed by signal 7 (a memory-mapped file"
        in Ended((1, -signal.SIGBUS), 0).describe()
    )


def test_memory_that_cannot_be_pinned(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(copies.torch, "empty", refuse)
    with pytest.raises(ValueError, match="256 MiB of pinned host memory cannot be had .*ulimit -l"):
        copies.PinnedCopies(1024)
