"""The cache of prepared data: found by the paths and all bytes of its files, and by nothing
less."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from freescale.data import Histories, prepare
from freescale.data.ingest import digest

TIME = (1_700_000_000, 1_700_000_000)  # as an archive or an image gives it to every file


def ratings(path: Path, *items: int) -> Path:
    """One user's events, each item of two digits: files of equally many items differ in content
    alone."""
    path.parent.mkdir(exist_ok=True)
    lines = [f"1,{item},4.0,{1000 + number}\n" for number, item in enumerate(items)]
    path.write_text("userId,movieId,rating,timestamp\n" + "".join(lines))
    os.utime(path, TIME)
    return path


def items_of(path: Path) -> list[int]:
    return pq.read_table(path).column("item_id").to_pylist()[0]


def fingerprint(path: Path) -> str:
    return Histories(path, 1).file.fingerprint


@pytest.fixture
def settled(monkeypatch):
    """A file system that keeps its own times, and files old enough to be remembered."""
    monkeypatch.setattr(digest, "keeps_own_times", lambda path, mounts: True)
    monkeypatch.setattr(digest, "_STABLE_S", -1.0)


def hashed(source: Path, cache: Path) -> bool:
    """Whether preparing read all bytes of the file."""
    stages: list[str] = []
    prepare(source, cache, progress=lambda stage, share: stages.append(stage))
    return "hash" in stages


def test_files_of_one_name_size_and_time_are_told_apart(tmp_path):
    first, second = (
        ratings(tmp_path / "a" / "ratings.csv", 11, 12),
        ratings(tmp_path / "b" / "ratings.csv", 91, 92),
    )
    assert (
        first.stat().st_size == second.stat().st_size
        and first.stat().st_mtime_ns == second.stat().st_mtime_ns
    )
    made = [prepare(path, tmp_path / "cache") for path in (first, second)]
    assert [items_of(path) for path in made] == [[11, 12], [91, 92]]
    assert fingerprint(made[0]) != fingerprint(made[1])


def test_another_content_at_the_same_path_is_prepared_anew_whatever_its_time(tmp_path, settled):
    path = ratings(tmp_path / "ratings.csv", 11, 12)
    first = prepare(path, tmp_path / "cache")
    ratings(path, 91, 92)  # rewritten: the kernel's time of the change is another
    assert items_of(prepare(path, tmp_path / "cache")) == [91, 92]
    replacement = ratings(tmp_path / "replacement.csv", 51, 52)
    os.replace(replacement, path)
    assert items_of(prepare(path, tmp_path / "cache")) == [51, 52]
    ratings(path, 11, 12)
    assert prepare(path, tmp_path / "cache") == first


def test_data_that_moved_is_the_same_data_to_a_run(tmp_path):
    paths = [ratings(tmp_path / folder / "ratings.csv", 11, 12) for folder in "ab"]
    first, second = (prepare(path, tmp_path / "cache") for path in paths)
    assert first != second and fingerprint(first) == fingerprint(second)
    Histories(second, 1).load_state_dict(Histories(first, 1).state_dict())
    link = tmp_path / "link.csv"
    link.symlink_to(paths[0])
    assert prepare(link, tmp_path / "cache") == first


def test_an_unchanged_file_is_read_whole_only_once(tmp_path, settled, monkeypatch):
    path = ratings(tmp_path / "ratings.csv", 11, 12)
    assert hashed(path, tmp_path / "cache")
    assert not hashed(path, tmp_path / "cache")
    (remembered,) = (tmp_path / "cache" / "digests").iterdir()
    remembered.write_text("{")  # a broken one is made again
    assert hashed(path, tmp_path / "cache") and not hashed(path, tmp_path / "cache")
    os.utime(path, TIME)  # its time of change is another, its content is not
    assert hashed(path, tmp_path / "cache")


def test_what_may_have_changed_unseen_is_read_again(tmp_path, settled, monkeypatch):
    path = ratings(tmp_path / "ratings.csv", 11, 12)
    # so new that a second change may bear the same time
    monkeypatch.setattr(digest, "_STABLE_S", 1e6)
    assert hashed(path, tmp_path / "cache") and hashed(path, tmp_path / "cache")
    monkeypatch.setattr(digest, "_STABLE_S", -1.0)
    monkeypatch.setattr(digest, "keeps_own_times", lambda path, mounts: False)
    assert hashed(path, tmp_path / "cache") and hashed(path, tmp_path / "cache")
    assert not (tmp_path / "cache" / "digests").exists()


def test_memory_that_cannot_be_written_costs_a_reading_and_no_more(tmp_path, settled):
    path = ratings(tmp_path / "ratings.csv", 11, 12)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "digests").write_text("not a folder")
    assert hashed(path, tmp_path / "cache") and hashed(path, tmp_path / "cache")


MOUNTS = """\
20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
21 20 7:0 / /image rw - squashfs /dev/loop0 ro
22 20 0:50 / /merged rw - overlay overlay rw,lowerdir=/a
23 20 0:51 / /bucket rw - fuse.gcsfuse bucket rw
24 20 8:2 / /frozen ro - ext4 /dev/sdb1 ro
25 20 8:3 / /view ro,relatime - xfs /dev/sdc1 rw
26 20 8:4 / /with\\040space rw - xfs /dev/sdd1 rw
27 20 8:5 / /twice rw - ext4 /dev/sde1 rw
28 27 0:52 / /twice rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/data/x", True),
        ("/image/x", False),
        ("/imagery/x", True),
        ("/merged/x", False),
        ("/bucket/x", False),
        ("/frozen/x", False),  # an image, perhaps
        ("/view/x", True),  # a container's read-only view of disks that are written elsewhere
        ("/with space/x", True),
        ("/twice/x", False),
    ],
)
def test_only_file_systems_that_set_the_time_of_a_change_are_trusted(path, kept):
    assert digest.keeps_own_times(Path(path), MOUNTS) == kept


def test_a_file_that_changes_while_it_is_prepared_is_refused(tmp_path):
    path = ratings(tmp_path / "ratings.csv", 11, 12)
    with pytest.raises(
        ValueError,
        match=(
            r"ratings.csv: the file changed while it was read; start "
            r"again"
        ),
    ):
        prepare(
            path,
            tmp_path / "cache",
            progress=lambda stage, share: ratings(path, 91, 92) if stage == "sort" else None,
        )
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.name != "digests"] == []


def test_ranks_that_ask_at_once_get_one_file_made_once(tmp_path):
    path, made, wrote = ratings(tmp_path / "ratings.csv", 11, 12), [], []

    def rank() -> None:
        made.append(
            prepare(path, tmp_path / "cache", progress=lambda stage, share: wrote.append(stage))
        )

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(made) == 4 and len(set(made)) == 1 and wrote.count("write") == 1


def test_content_is_all_bytes_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "_BLOCK", 4)
    seen = set()
    for number, content in enumerate(
        (
            b"abcdefgh",
            b"efghabcd",
            b"abcdefgi",
            b"abcdefghi",
            b"abcd",
            b"a" * 400,
            b"a" * 399 + b"b",
        )
    ):
        path = tmp_path / str(number)
        path.write_bytes(content)
        shares: list[float] = []
        (found,) = digest.read_contents([path], tmp_path / "memory", shares.append)
        assert shares == sorted(shares) and shares[-1] == 1.0
        seen.add(found.digest)
    assert len(seen) == 7
