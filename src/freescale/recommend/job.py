"""Recommendations for many users: ranks share the users, each chunk is a file, and what a stopped
job has written is kept."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.data.ingest.digest import compute_digest
from freescale.recommend.filters import find_offered, read_ids
from freescale.recommend.known_users import KnownUsers, open_users
from freescale.recommend.recommender import Recommender
from freescale.recommend.requests import Requests
from freescale.stores.path import is_store, remove_tree
from freescale.transport.api import Transport
from freescale.transport.failures import run_on_all_ranks

FORMATS = (".parquet", ".csv", ".jsonl")
_CHUNK = 4096  # users of a chunk: a stopped job repeats one of each rank at most
_MERGED = 20_000_000  # recommendations that are sorted at a time

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Job:
    """What to recommend to whom.

    Attributes:
        out: the file to write, Parquet, CSV or JSON lines by its name.
        users: `all`, or a file of user ids.
        k: items for each user.
        exclude_seen: leave out the items of a user's history.
        candidates: a file of the items to choose from; None: all.
        filters: as of `find_offered`.
        before: `validation` or `test`: histories as `freescale eval` sees them. None: whole ones.
    """

    out: Path
    users: str = "all"
    k: int = 10
    exclude_seen: bool = False
    candidates: str | None = None
    filters: Sequence[str] = ()
    before: str | None = None

    def __post_init__(self) -> None:
        if self.out.suffix not in FORMATS:
            raise ValueError(f"--out {self.out}: end its name with one of {', '.join(FORMATS)}")
        if not is_store(self.out) and not self.out.absolute().parent.is_dir():
            raise ValueError(f"--out {self.out}: there is no folder {self.out.absolute().parent}")
        if self.k < 1:
            raise ValueError(f"--k is {self.k}; it must be 1 or more")


def run_job(
    job: Job, recommender: Recommender, transport: Transport, report: Progress
) -> list[str]:
    """Runs a job, or what is left of it. A collective.

    Args:
        job: the same on all ranks.
        recommender: the model, on this rank's device.
        transport: joins the ranks.
        report: called with a stage and the share done, on every rank.

    Returns:
        Lines for people: what was written and what was left out.
    """
    loaded = recommender.loaded
    people = open_users(loaded, job.before)
    samples, lines = np.arange(len(people)), []
    if job.users != "all":
        samples = np.sort(people.find(read_ids(job.users, "user")))
    wanted = None if job.candidates is None else read_ids(job.candidates, "item")
    offered, unknown = find_offered(loaded, wanted, job.filters)
    if unknown:
        lines.append(f"{unknown:,} candidates are left out: the model does not know them")
    parts = job.out.with_name(f"{job.out.name}.parts")
    key = compute_digest(
        _describe(recommender), job.k, job.exclude_seen, job.before, _sum(samples),
        None if offered is None else _sum(offered),
    )  # fmt: skip
    run_on_all_ranks(transport, lambda: _open(parts, key) if transport.rank == 0 else None)
    chunks = [samples[first : first + _CHUNK] for first in range(0, len(samples), _CHUNK)]
    files = [parts / f"{number:08d}.parquet" for number in range(len(chunks))]
    kept = sum(file.is_file() for file in files)
    transport.gather_bytes(b"")  # all ranks have seen what an earlier job left
    if kept:
        lines.append(f"{kept:,} of {len(files):,} chunks were there from a job that was stopped")

    def recommend_own() -> None:
        for number in range(transport.rank, len(chunks), transport.world):
            if not files[number].is_file():
                table = _recommend(recommender, people, chunks[number], job, offered)
                temporary = files[number].with_suffix(f".tmp{transport.rank}")
                with temporary.open("wb") as file:
                    pq.write_table(table, file)
                temporary.replace(files[number])
            done = sum(file.is_file() for file in files) if len(files) < 1000 else number
            report("recommend", done / len(files))
        report("recommend", 1.0)

    run_on_all_ranks(transport, recommend_own)
    if transport.rank == 0:
        rows = _merge(files, job.out, report)
        remove_tree(parts)
        lines.insert(0, f"{job.out}: {rows:,} recommendations for {len(samples):,} users")
    transport.gather_bytes(b"")
    return lines


def _describe(recommender: Recommender) -> Any:
    loaded = recommender.loaded
    assert loaded.checkpoint is not None and loaded.histories is not None
    return loaded.checkpoint.checksum, loaded.histories.fingerprint


def _sum(numbers: NDArray[np.int64]) -> str:
    return blake2b(numbers.tobytes(), digest_size=16).hexdigest()


def _open(parts: Path, key: str) -> None:
    """Makes the folder of chunks; those of a different job are removed."""
    about = parts / "job.json"
    if about.is_file() and json.loads(about.read_text(encoding="utf-8")) == key:
        return
    remove_tree(parts)
    parts.mkdir()
    about.write_text(json.dumps(key), encoding="utf-8")


def _recommend(
    recommender: Recommender,
    people: KnownUsers,
    samples: NDArray[np.int64],
    job: Job,
    offered: NDArray[np.int64] | None,
) -> pa.Table:
    requests = Requests(*people.read(samples), people.name(samples))
    rows, scores = recommender.recommend_requests(requests, job.k, job.exclude_seen, offered)
    there = rows >= 0
    places = np.broadcast_to(np.arange(1, rows.shape[1] + 1, dtype=np.int32), rows.shape)
    users = pa.array(requests.users).take(pa.array(np.repeat(np.arange(len(rows)), there.sum(1))))
    return pa.table(
        {
            "user": users,
            "place": places[there],
            "item": recommender.items.ids.take(pa.array(rows[there])),
            "score": pa.array(scores[there], from_pandas=True),  # null without a history
        }
    )


def _merge(files: Sequence[Path], out: Path, report: Progress) -> int:
    """Writes all chunks in the order of users. Returns the number of rows."""
    users = [_read(file, ["user"]).column("user") for file in files]
    each = pa.chunked_array([chunk for column in users for chunk in column.chunks])
    ranges = -(-len(each) // _MERGED) or 1
    ordered = pc.sort_indices(each)
    edges = [each[ordered[len(each) * n // ranges].as_py()] for n in range(1, ranges)]
    bounds = list(zip([None, *edges], [*edges, None], strict=True))
    schema = _read(files[0]).schema
    temporary = out.with_name(f"{out.name}.tmp")
    with _open_writer(temporary, out.suffix, schema) as write:
        for number, (low, high) in enumerate(bounds):
            tables = [_cut(_read(file), low, high) for file in files]
            write(pa.concat_tables(tables).sort_by([("user", "ascending"), ("place", "ascending")]))
            report("sort", (number + 1) / ranges)
    temporary.replace(out)
    return len(each)


def _read(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    with path.open("rb") as file:
        return pq.read_table(file, columns=columns)


def _cut(table: pa.Table, low: Any, high: Any) -> pa.Table:
    """The rows of users from `low` on and before `high`; None: no bound."""
    if low is not None:
        table = table.filter(pc.greater_equal(table.column("user"), low))
    if high is not None:
        table = table.filter(pc.less(table.column("user"), high))
    return table


@contextmanager
def _open_writer(path: Path, suffix: str, schema: pa.Schema) -> Iterator[Callable[[pa.Table], Any]]:
    """Yields a function that adds a table to a file."""
    with path.open("wb") as file:
        if suffix == ".jsonl":
            with io.TextIOWrapper(file, encoding="utf-8") as lines:
                yield lambda table: lines.writelines(_list_lines(table))
        else:
            kind = pq.ParquetWriter if suffix == ".parquet" else pa.csv.CSVWriter
            with kind(file, schema) as writer:
                yield writer.write_table


def _list_lines(table: pa.Table) -> Iterator[str]:
    """A line of JSON for each user."""
    users = table.column("user").combine_chunks()
    items, scores = (table.column(name).to_pylist() for name in ("item", "score"))
    starts = np.flatnonzero(table.column("place").to_numpy() == 1).tolist()
    for first, last in zip(starts, [*starts[1:], table.num_rows], strict=True):
        entry = {
            "user": users[first].as_py(),
            "items": items[first:last],
            "scores": scores[first:last],
        }
        yield json.dumps(entry, ensure_ascii=False) + "\n"
