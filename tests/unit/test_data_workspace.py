"""What a killed preparation leaves is cleared, a live one's is not; a full disk is named and left
as it was."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data import generate, prepare, workspace


def events(path: Path, count: int = 4) -> Path:
    generator = np.random.default_rng(0)
    columns = {
        "user_id": generator.integers(0, max(count // 20, 1), count),
        "item_id": generator.integers(0, 1000, count),
    }
    pq.write_table(pa.table(columns | {"timestamp": generator.integers(0, 1 << 40, count)}), path)
    return path


def at_work(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name.startswith(".")]


STALLS = """
import sys, time
from pathlib import Path
from freescale.data import prepare
def stall(stage, share):
    if stage == "write":
        print(stage, flush=True)
        time.sleep(600)
prepare(sys.argv[1], Path(sys.argv[2]), progress=stall)
"""


def test_what_a_killed_preparation_leaves_is_cleared_and_a_live_ones_is_not(tmp_path):
    cache = tmp_path / "cache"
    ready = prepare(events(tmp_path / "ready.parquet"), cache)
    command = [
        sys.executable,
        "-c",
        STALLS,
        str(events(tmp_path / "events.parquet", 100)),
        str(cache),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        try:
            assert killed.stdout is not None and killed.stdout.readline() == "write\n"
            (folder,) = at_work(cache)
            # what is there already needs no turn
            assert prepare(tmp_path / "ready.parquet", cache) == ready
            assert (folder / "unordered.arrow").is_file()  # its maker lives
        finally:
            killed.send_signal(signal.SIGKILL)
        killed.wait(60)
    assert (folder / "unordered.arrow").is_file()
    assert prepare(tmp_path / "ready.parquet", cache) == ready
    assert at_work(cache) == []
    assert prepare(tmp_path / "events.parquet", cache).is_file()


def left(cache: Path, name: str, mark: str | None, age: float) -> Path:
    """A folder as somebody left it `age` seconds ago."""
    folder = cache / name
    (folder / "users0").mkdir(parents=True)
    (folder / "users0" / "0.arrow").write_bytes(b"events")
    if mark is not None:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() if mark == HERE else mark
        (folder / workspace.MARK).write_text(boot)
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - age,) * 2)
    return folder


HERE, ELSEWHERE, HOUR = "here", "elsewhere", 3600
UNMARKED = ".0123456789abcdef-abcd_123"


@pytest.mark.parametrize(
    ("name", "mark", "age", "cleared"),
    [
        pytest.param(".key-1", HERE, 0, True, id="dead, of this host"),
        # perhaps at work, where its lock is not seen from here
        pytest.param(".key-1", ELSEWHERE, HOUR, False, id="of another host, an hour old"),
        pytest.param(".key-1", ELSEWHERE, 25 * HOUR, True, id="of another host, a day old"),
        # about to be signed, or without locks
        pytest.param(".key-1", "", HOUR, False, id="unsigned, an hour old"),
        pytest.param(".key-1", "", 25 * HOUR, True, id="unsigned, a day old"),
        pytest.param(UNMARKED, None, HOUR, False, id="unmarked, an hour old"),
        pytest.param(UNMARKED, None, 25 * HOUR, True, id="unmarked, a day old"),
        pytest.param(".git", None, 25 * HOUR, False, id="hidden, not ours"),
        pytest.param("key-1", HERE, 25 * HOUR, False, id="not hidden"),
    ],
)
def test_only_folders_of_makers_that_are_surely_dead_are_cleared(
    tmp_path, name, mark, age, cleared
):
    folder = left(tmp_path, name, mark, age)
    workspace.remove_dead_workspaces(tmp_path)
    assert folder.exists() != cleared


@pytest.mark.parametrize("mark", [HERE, ELSEWHERE])
def test_a_locked_folder_stays_however_old_it_is(tmp_path, mark):
    folder = left(tmp_path, ".key-1", mark, 1000 * HOUR)
    with open(folder / workspace.MARK, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        workspace.remove_dead_workspaces(tmp_path)
        assert (folder / "users0" / "0.arrow").exists()
    workspace.remove_dead_workspaces(tmp_path)
    assert not folder.exists()


def test_generating_clears_too_and_leaves_nothing(tmp_path):
    left(tmp_path, ".h.parquet-1", HERE, 0)
    generate(tmp_path / "h.parquet", users=10, items=10, median=4, cap=9)
    assert [path.name for path in tmp_path.iterdir()] == ["h.parquet"]


@pytest.mark.parametrize(
    ("folders", "files"), [(True, False), (True, True)], ids=["locks files only", "locks nothing"]
)
def test_file_systems_without_locks_prepare_too(tmp_path, monkeypatch, folders, files):
    whole = fcntl.flock

    def refusing(descriptor, operation):
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if folders and folder or files and not folder:
            raise OSError(errno.EBADF if folder else errno.ENOLCK, "no locks here")
        whole(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refusing)
    left(tmp_path / "cache", ".key-1", "", HOUR)
    assert prepare(events(tmp_path / "e.parquet"), tmp_path / "cache").is_file()
    assert [path.name for path in at_work(tmp_path / "cache")] == [".key-1"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the quota is used up")],
)
def test_an_error_of_a_full_disk_is_one_line_that_says_what_is_needed(tmp_path, number, words):
    source = events(tmp_path / "e.parquet", 1000)  # of 24 bytes each

    def full(stage: str, share: float) -> None:
        if stage == "sort":
            raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=words) as error:
        prepare(source, tmp_path / "cache", progress=full)
    assert error.value.errno == number
    message = str(error.value)
    assert message.startswith(
        f"{tmp_path / 'cache'}: {words} while preparing {source}; it needs up to 48."
    )
    assert (
        message.endswith("; make room, or name a cache folder on another disk")
        and "\n" not in message
    )
    # of a quota that is not known
    assert (" are free now; " in message) == (number == errno.ENOSPC)
    assert at_work(tmp_path / "cache") == []
    with pytest.raises(OSError, match="elsewhere"):  # others stay as they are
        prepare(
            source,
            tmp_path / "cache",
            progress=lambda stage, share: (_ for _ in ()).throw(OSError(errno.EIO, "elsewhere")),
        )


FILLS = """
import os, shutil, sys
from pathlib import Path
from freescale.data import generate, prepare
source, cache = Path(sys.argv[1]), Path(sys.argv[2])
def fill():
    return generate(cache / "h.parquet", users=8_000, items=1000, median=40)
for work in (lambda: prepare(source, cache), fill):
    try:
        work()
    except OSError as error:
        print(error)
    left = [name for name in os.listdir(cache) if name != "digests"]
    print(left, shutil.disk_usage(cache).used < 20_000)
"""


def test_a_disk_that_is_full_indeed_is_named_and_left_empty(tmp_path):
    source, disk = events(tmp_path / "e.parquet", 100_000), tmp_path / "disk"
    disk.mkdir()
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0"'
    possible = subprocess.run([*inside, mount, str(disk)], capture_output=True, text=True)
    if possible.returncode:
        pytest.skip(f"no disk of one's own here: {possible.stderr.strip()}")
    command = [
        *inside,
        f'{mount} && exec "$1" -c "$2" "$3" "$0"',
        str(disk),
        sys.executable,
        FILLS,
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    prepared, nothing, generated, still_nothing = done.stdout.splitlines()
    assert prepared.startswith(
        f"{disk}: the disk is full while preparing {source}; it needs up to 4."
    )
    assert generated.startswith(f"{disk}: the disk is full while generating h.parquet; ")
    assert nothing == still_nothing == "[] True"
