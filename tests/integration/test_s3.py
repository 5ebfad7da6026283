"""Data, checkpoints and exports in a real S3 server: the same as on a disk, with errors and
latency, after kills, and with writers that were taken over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.command import freescale

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from freescale_bench.stores.publications import kill_writers, write_late
from freescale_bench.stores.s3_server import BUCKET, SECRET, S3Server, run_s3

from freescale.data import Histories, NegativeSpec, ReadSpec, generate, prepare
from freescale.data.histories import HistoriesFile
from freescale.stores.path import StorePath, as_path, upload, writing
from freescale.train.state.stored import StoredFolder

ROOT = as_path(f"s3://{BUCKET}")
SMALL = ["--device", "cpu", "--width", 16, "--layers", 1, "--global-batch", 32, "--max-length", 20]
SMALL += ["--checkpoint-every", 5, "--log-every", 1, "--nproc", 2, "--evaluate-every", 1]


@pytest.fixture(scope="session")  # long tests begin first: the others come back to it
def server() -> Iterator[S3Server]:
    with run_s3(latency=0.01, errors=0.05) as running:
        yield running


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def write_histories(folder: Path, files: int = 4, groups: int = 5) -> None:
    """Also what other programs leave in a folder."""
    generate(folder.with_suffix(".parquet"), users=files * groups * 20, items=300, seed=1)
    table = pq.read_table(folder.with_suffix(".parquet")).replace_schema_metadata(None)
    folder.mkdir()
    for number in range(files):
        part = table.slice(number * groups * 20, groups * 20)
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=20)
    (folder / "_SUCCESS").touch()


@pytest.fixture(scope="session")  # long tests begin first: the others come back to it
def histories(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StorePath]:
    """The same histories in a folder and in the store."""
    folder = tmp_path_factory.mktemp("data") / "histories"
    write_histories(folder)
    for path in folder.iterdir():
        upload(path, StorePath(ROOT, "data", path.name))
    return folder, StorePath(ROOT, "data")


def test_objects_are_written_if_they_are_as_they_were(server: S3Server) -> None:
    path = StorePath(ROOT, "conditions", "one")
    assert path.read_version() is None and not path.exists()
    first = path.write_if(b"first", None)
    assert first is not None and path.write_if(b"other", None) is None
    second = path.write_if(b"second", first)
    assert path.write_if(b"third", first) is None
    assert path.read_version() == (b"second", second) and path.stat().st_size == 6
    path.unlink()
    assert path.write_if(b"fourth", second) is None and not path.exists()


def test_large_objects_are_read_in_blocks(server: S3Server) -> None:
    data = np.random.default_rng(0).integers(0, 256, 21 << 20, np.uint8).tobytes()
    path = StorePath(ROOT, "large")
    with path.open("wb") as file:
        for begin in range(0, len(data), 1 << 20):
            file.write(data[begin : begin + (1 << 20)])
    with path.open("rb") as file:
        assert file.read() == data
        for place in (0, 5 << 20, len(data) - 7, 9 << 20):
            file.seek(place)
            assert file.read(100) == data[place : place + 100]


def test_programs_that_know_no_stores_are_refused(server: S3Server, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"s3://{BUCKET}/x is in an object store"):
        open(StorePath(ROOT, "x"), "w")  # noqa: SIM115
    assert not (tmp_path / "s3:").exists()


def test_batches_are_those_of_the_folder(histories: tuple[Path, StorePath], cache: Path) -> None:
    """Row groups are read in any order, and ahead; nothing but footers and counts is kept here."""
    folder, stored = histories
    for rank in range(2):
        for shuffle in (True, False):
            read = ReadSpec(shuffle=shuffle, shuffle_groups=3, epochs=2, kept_bytes=0)
            both = [
                Histories(
                    path, 32, rank=rank, world=2, read=read,
                    negatives=NegativeSpec(source="popularity", per="batch"),
                )
                for path in (folder, stored)
            ]  # fmt: skip
            assert prepare(str(stored), cache) == stored
            for number in range(both[0].stop):
                expected, found = (each.batch(number).tensors() for each in both)
                assert all(map(torch.equal, expected, found)) and len(expected) == len(found)
    kept = [path for path in cache.rglob("*") if path.is_file() and path.name != "counts.npy"]
    assert all("footers" in path.parts or path.stat().st_size < 100 for path in kept)


def test_only_the_columns_that_are_read_are_requested(
    histories: tuple[Path, StorePath], server: S3Server
) -> None:
    file = HistoriesFile(histories[1])
    before = server.read_statistics()["answered"]
    file.read(7, ("item_id",))
    (chunk,) = [
        chunk
        for chunk in map(file.file.describe(7).column, range(3))
        if chunk.path_in_schema.startswith("item_id")
    ]
    size = server.read_statistics()["answered"] - before
    assert chunk.total_compressed_size <= size < 3 * chunk.total_compressed_size + 1000


@pytest.mark.long
def test_a_run_is_that_of_a_disk(
    histories: tuple[Path, StorePath], server: S3Server, tmp_path: Path
) -> None:
    texts, runs = [], {}
    for name, data, folder, out in (
        ("disk", histories[0], tmp_path / "run", tmp_path / "export"),
        ("store", histories[1], f"{ROOT}/run", f"{ROOT}/export"),
    ):
        commands = [
            ("train", "--data", data, "--folder", folder, *SMALL, "--steps", 8),
            ("train", "--folder", folder, "--resume", "--steps", 14, "--nproc", 2),
            ("export", folder, "--out", out),
            ("eval", folder),
            ("recommend", folder, "--out", f"{out}/recommended.csv"),
            ("checkpoints", folder, "--verify"),
        ]
        for command in commands:
            done = freescale(*command)
            assert done.returncode == 0, (command, done.stderr)
            texts.append(done.stdout + done.stderr)
        runs[name] = as_path(folder), as_path(out)
    lines = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run, _ in runs.values()
    ]
    losses, metrics = (
        [[line[key] for line in log if key in line] for log in lines] for key in ("loss", "test")
    )
    assert losses[0] == losses[1] and len(losses[0]) == 14
    assert metrics[0] == metrics[1] and metrics[0]
    exports = [out for _, out in runs.values()]
    for path in exports[0].iterdir():
        if path.name != "config.json":
            assert path.read_bytes() == (exports[1] / path.name).read_bytes(), path.name
    assert {path.name for path in exports[0].iterdir()} == {
        path.name for path in exports[1].iterdir()
    }
    # nothing that was said, and no file here or there, has credentials
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    contents = [path.read_bytes() for path in [*files, *ROOT.rglob("*")]]
    assert len(contents) > 30 and not any(SECRET.encode() in content for content in contents)
    assert not any(SECRET in text for text in texts)
    assert not list((tmp_path / "runs").rglob("checkpoints"))


def test_a_run_of_another_machine_continues(
    histories: tuple[Path, StorePath], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder here is empty: config and logs come from the store, and go back."""
    run = f"{ROOT}/moved"
    first = ["train", "--data", histories[1], "--folder", run, *SMALL[:-4], "--steps", 6]
    assert freescale(*first).returncode == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    done = freescale("train", "--folder", run, "--resume", "--steps", 9)
    assert done.returncode == 0, done.stderr
    log = (as_path(run) / "metrics.jsonl").read_text().splitlines()
    steps = [entry["step"] for entry in map(json.loads, log) if "loss" in entry]
    assert steps == list(range(1, 10))
    again = freescale(*first)
    assert again.returncode == 1 and "already holds a run" in again.stderr


def test_a_folder_has_one_writer(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freescale.train.state.stored.RENEWED_S", 0.3)
    first, second = (StoredFolder(StorePath(ROOT, "writers")) for _ in range(2))
    first.claim()
    with pytest.raises(ValueError, match=r"in use by another run \(process \d+ on "):
        second.claim()
    first.close()
    second.claim()
    with pytest.raises(ValueError, match="in use"):
        first.begin(1)
    second.close()


def test_a_late_writer_removes_nothing(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has noticed that another one has taken over."""
    monkeypatch.setattr("freescale.train.state.stored.RENEWED_S", 1000.0)
    monkeypatch.setattr("freescale.train.state.stored._EXPIRES_S", 1.5)
    late, newer = (StoredFolder(StorePath(ROOT, "removals")) for _ in range(2))
    remains = late.begin(1)
    (late.folder / remains / "data").write_bytes(b"late")
    newer.claim()
    begun = newer.begin(2)
    assert not (newer.folder / remains).exists()
    (newer.folder / begun / "data").write_bytes(b"newer")
    late.clear()
    assert (newer.folder / begun / "data").is_file()
    with pytest.raises(ValueError, match="has another writer now"):
        late.finish(1)
    newer.finish(2)
    assert late.steps() == newer.steps() == [2] and newer.path(2) == newer.folder / begun
    newer.close()


@pytest.mark.long
def test_kills_lose_no_checkpoint(server: S3Server, tmp_path: Path) -> None:
    rows = kill_writers(StorePath(ROOT, "kills"), 4, tmp_path / "notes")
    assert not any(row["lost"] for row in rows)
    assert rows[-1]["saved"] > 0 and any(row["during"] for row in rows)


@pytest.mark.long
def test_writers_that_were_taken_over_change_nothing(server: S3Server, tmp_path: Path) -> None:
    row = write_late(StorePath(ROOT, "late"), 4, tmp_path / "notes")
    assert row == {
        "late writers": 4, "attempts": 8, "refused": 8, "overwritten": 0, "ended": True
    }  # fmt: skip


def test_an_export_is_complete_or_absent(server: S3Server) -> None:
    out = StorePath(ROOT, "written")
    for content in (b"one", b"two"):
        with writing(out, "export.json") as place:
            (place / "export.json").write_bytes(content)
            (place / f"weights-{content.decode()}").write_bytes(content)
    assert [path.name for path in out.iterdir()] == ["export.json", "weights-two"]
    with pytest.raises(OSError, match="stopped"), writing(out, "export.json") as place:
        (place / "weights-three").write_bytes(b"three")
        raise OSError("stopped")
    assert (out / "export.json").read_bytes() == b"two"


def test_the_page_says_what_the_library_does() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "s3.md").read_text(encoding="utf-8")
    assert re.search(r"pip install 'freescale\[s3\]'", page)
