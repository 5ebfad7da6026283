"""A stream of events as a run keeps it: windows that are over, in an event store, and the events of
those that are not.

    store/           the event store. store.json names everything else, and is written last: what it
                     does not name is not there. So segments, manifests, the position in the source
                     and the events that wait change together or not at all
    windows.jsonl    the manifest of each window
    waiting-N.arrow  events that were read and belong to windows that are not over
    first/           the events of the first window as a histories file, and the texts of hashed
                     ids and categories of all, as they came: later rows are of later windows
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config.time_order import Duration
from freescale.data.catalogue import select_texts
from freescale.data.durable import append_at, put_in_place, sync, sync_tree
from freescale.data.histories import HistoriesMetadata
from freescale.data.histories_writer import HistoriesWriter, make_schema
from freescale.data.ingest.digest import compute_digest
from freescale.data.ingest.hashed_ids import hash_ids
from freescale.data.ingest.ids import VOCABULARY
from freescale.data.store.build import (
    fit_integers,
    merge,
    name_segment,
    plan_merge,
    remove_unlisted,
    write_about,
)
from freescale.data.store.event_store import ABOUT, EventStore
from freescale.data.store.segment import Segment, SegmentWriter
from freescale.data.stream.parsing import EVENT_ID, MISSING, Columns, Parser, Texts
from freescale.data.stream.source import Chunk, Source
from freescale.data.stream.windows import WindowRule

Manifest = dict[str, Any]
STREAM = "stream"  # name of the folder, in that of a run
FIRST, STORE, WINDOWS = "first", "store", "windows.jsonl"
HISTORIES = "histories.parquet"
_AHEAD = 2  # windows that a partition may be read ahead of the slowest one
_PLACE, _OFFSET, _WINDOW, _TIME = "\0partition", "\0offset", "\0window", "\0time"
_Ids = NDArray[np.int64]


class Stream:
    """Reads a source and closes windows. One process has it.

    Args:
        folder: of the stream; made if there is none.
        source: where events come from; it goes on behind what the folder has.
        parser: of the source.
        rule: makes windows of events.
        durations: length and lateness of the rule, which the unit of the first times decides.
        about: settings that later runs in this folder have to have, too.
        remembered: windows whose event ids are known, to find events that come twice.
        idle: seconds after which a clock without events does not hold up the others.
    """

    def __init__(
        self,
        folder: Path,
        source: Source,
        parser: Parser,
        rule: WindowRule,
        durations: tuple[Duration, Duration],
        about: Mapping[str, Any],
        remembered: int,
        idle: float | None = None,
    ) -> None:
        self._folder, self._source, self._parser, self._rule = folder, source, parser, rule
        self._durations = durations
        self._about, self._remembered, self._idle = dict(about), remembered, idle
        self._blocks: list[Columns] = []  # events that wait, also by window and place
        self._names: list[str] = []  # names of partitions, by their number in blocks
        self._texts: Texts = {}  # texts of ids that wait
        self._entries: list[dict[str, Any]] = []
        # ids of items and actions that are known, ascending
        self._known = {name: np.zeros(0, np.int64) for name in ("item_id", "action")}
        self._numbers: dict[str, dict[int, int]] = {}  # categories: column -> id -> number
        self._ends: dict[str, int] = {}  # column -> end of the numbers with a row
        self._seen: dict[int, _Ids] = {}  # ids of events by window
        self._length = self._rows = 0  # bytes of the manifests, rows of the vocabulary
        self._waiting: str | None = None
        self._digest, self._repeated, self._arrived = "", 0, 0.0
        self.count = 0  # number of windows that are over
        self.recent: dict[int, Manifest] = {}  # manifests of windows that just closed, by number
        self._heard: dict[str, float] = {}
        self.last_read = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / STORE / ABOUT).exists():
            self._restore()

    # ---- reading

    def advance(self, seconds: float) -> bool:
        """Reads what comes next. True: windows have closed, and are on disk."""
        chunks = self._source.poll(seconds)
        for chunk in chunks:
            self._add(chunk)
        closed = self._list_closed()
        if closed:
            self._commit(closed)
        if chunks or closed:  # however long that took
            self.last_read = time.monotonic()
        return bool(closed)

    def finish(self) -> None:
        """Reads what there is, and closes all windows. ValueError: there is nothing."""
        for chunk in self._source.poll(0.0):
            self._add(chunk)
        if not self._blocks:
            raise ValueError("the files have no events (0 rows); give one with events")
        self._commit(sorted({int(w) for block in self._blocks for w in np.unique(block[_WINDOW])}))

    def _add(self, chunk: Chunk) -> None:
        self._heard[chunk.clock] = time.monotonic()
        self._arrived = max(self._arrived, chunk.arrived)
        if not self._rule.length:
            unit = self._parser.unit
            self._rule.length, self._rule.lateness = (d.convert(unit) for d in self._durations)
        windows, times, kept = self._rule.assign(chunk)
        if chunk.partition not in self._names:
            self._names.append(chunk.partition)
        place = np.full(len(times), self._names.index(chunk.partition))
        block = {**chunk.events.columns, _PLACE: place, _OFFSET: chunk.offsets}
        block |= {_WINDOW: windows, _TIME: times}
        self._blocks.append({name: values[kept] for name, values in block.items()})
        if len(self._blocks) > 64:
            self._blocks = [_concat(self._blocks)]
        for name, texts in chunk.events.texts.items():
            self._texts.setdefault(name, {}).update(texts)

    def _list_closed(self) -> list[int]:
        """Windows with events that all clocks have passed."""
        clocks, rule, now = self._source.clocks, self._rule, time.monotonic()
        if not any(clock in rule.tops for clock in clocks):
            return []
        live = [
            clock
            for clock in clocks
            if self._idle is None or now - self._heard.setdefault(clock, now) <= self._idle
        ]
        self._source.hold(rule.list_ahead(live, _AHEAD))
        first = map(rule.find_open, live or clocks)
        over = min(first) if live else max(first)
        windows = {int(w) for block in self._blocks for w in np.unique(block[_WINDOW]) if w < over}
        if windows:
            rule.closed = max(rule.closed, over - 1)
        return sorted(windows)

    # ---- windows

    def _commit(self, windows: Sequence[int]) -> None:
        """Closes windows: everything about them is on disk when this returns."""
        store, entries = self._folder / STORE, self._entries
        store.mkdir(exist_ok=True)
        if entries:
            remove_unlisted(EventStore(store))
        waiting = _concat(self._blocks)
        position, manifests = self._source.position(), []
        texts: list[tuple[str, int, str]] = []
        for window in windows:
            chosen = waiting[_WINDOW] == window
            events, duplicates = self._order({n: v[chosen] for n, v in waiting.items()}, window)
            manifest = self._describe(window, events, duplicates, position)
            position = self._source.position()  # only the first manifest lists what was read
            added = [*self._list_texts(events, manifest), *self._number(events, manifest)]
            manifest["texts"] = [self._rows + len(texts), len(added)]
            texts += added
            if not self.count:
                self._write_first(events, manifest)
            if manifest["events"]:
                self._add_segment(events)
            manifests.append(manifest)
            self.count += 1
        rest = self._keep_waiting(waiting, waiting[_WINDOW] > windows[-1])
        lines = b"".join(json.dumps(each).encode() + b"\n" for each in manifests)
        self._length = append_at(self._folder / WINDOWS, self._length, lines)
        if texts:
            self._add_texts(texts)
        before, self._waiting = self._waiting, self._write_waiting(rest)
        self._write_about()
        self.recent |= {manifest["number"]: manifest for manifest in manifests}
        if before is not None:
            (self._folder / before).unlink(missing_ok=True)

    def _order(self, events: Columns, window: int) -> tuple[Columns, int]:
        """The events of a window by time, partition and offset, without those that came before;
        and how many came before."""
        names, ranks = self._names, np.empty(len(self._names), np.int64)
        order = sorted(range(len(names)), key=lambda place: self._source.rank(names[place]))
        ranks[order] = np.arange(len(names))
        keys = (events[_OFFSET], ranks[events[_PLACE]], events["timestamp"], events[_TIME])
        places, duplicates = np.lexsort(keys), 0
        if EVENT_ID in events:
            ids = events[EVENT_ID][places]
            new = np.zeros(len(ids), bool)
            new[np.unique(ids, return_index=True)[1]] = True
            for at in [at for at in self._seen if at < window - self._remembered]:
                del self._seen[at]
            for seen in self._seen.values():
                new &= ~np.isin(ids, seen)
            self._seen[window] = ids[new]
            places, duplicates = places[new], int((~new).sum())
        found = {name: values[places] for name, values in events.items()}
        return found | {"timestamp": found[_TIME]}, duplicates

    def _describe(
        self, window: int, events: Columns, duplicates: int, position: Mapping[str, Any]
    ) -> Manifest:
        """The manifest of a window. Its digest is of all events until its end."""
        length, rule = self._rule.length, self._rule
        sums = [[name, _sum(events[name])] for name in events if name[0] != "\0"]
        checksum = compute_digest(sums)
        self._digest = compute_digest(self._digest, window, checksum)
        repeated, self._repeated = self._source.repeated - self._repeated, self._source.repeated
        return {
            "number": self.count,
            "window": window,
            "from": window * length,
            "to": (window + 1) * length,
            "events": len(events["timestamp"]),
            "users": len(np.unique(events["user_id"])),
            "items": len(np.unique(events["item_id"])),
            "late": rule.late.pop(window, 0),
            "dropped": rule.dropped.pop(window, 0),
            "duplicates": duplicates,
            "repeated": repeated,
            "partitions": self._list_partitions(events),
            "position": position,
            "tops": dict(rule.tops),
            "arrived": self._arrived,
            "closed": time.time(),
            "checksum": checksum,
            "digest": self._digest,
        }

    def _list_partitions(self, events: Columns) -> dict[str, list[int]]:
        """Of each partition with events: the first and the last offset, and how many."""
        found = {}
        for place in np.unique(events[_PLACE]):
            offsets = events[_OFFSET][events[_PLACE] == place]
            span = [int(offsets.min()), int(offsets.max()), len(offsets)]
            found[self._names[place]] = span
        return found

    def _list_texts(self, events: Columns, manifest: Manifest) -> list[tuple[str, int, str]]:
        """Columns, ids and texts of ids that no window before has. How many ids are new goes to the
        manifest."""
        found: list[tuple[str, int, str]] = []
        for name in ("user_id", "item_id", "action"):
            if name not in events:
                continue
            ids = np.unique(events[name])
            if name == "user_id":
                known = np.zeros(len(ids), bool)
                for entry in self._entries:
                    known |= Segment(self._folder / STORE / entry["name"]).locate(ids)[1] > 0
            else:
                known = np.isin(ids, self._known[name])
                self._known[name] = np.union1d(self._known[name], ids)
            manifest[f"new_{name.removesuffix('_id')}s"] = int((~known).sum())
            texts = self._texts.get(name, {})
            found += [(name, id, texts[id]) for id in ids[~known].tolist() if id in texts]
        return found

    def _number(self, events: Columns, manifest: Manifest) -> list[tuple[str, int, str]]:
        """Numbers the categories in the order in which they come, over all windows. Returns
        columns, numbers and texts of the new ones. What features hold goes to the manifest."""
        found: list[tuple[str, int, str]] = []
        figures = manifest["values"] = dict[str, float]()
        for name in self._parser.features if len(events["user_id"]) else ():
            values, column = events[name], name.partition(".")[2]
            if name.startswith("number."):
                there = values[~np.isnan(values)]
                figures[f"{column}/missing"] = 1 - len(there) / len(values)
                figures |= {f"{column}/mean": float(there.mean())} if len(there) else {}
                continue
            numbers = self._numbers.setdefault(name, {MISSING: -1})
            ids, first, back = np.unique(values, return_index=True, return_inverse=True)
            before = len(numbers)
            for id in ids[np.argsort(first)].tolist():
                if id not in numbers:
                    found.append((name, len(numbers) - 1, self._texts[name][id]))
                    numbers[id] = len(numbers) - 1
            events[name] = np.array([numbers[id] for id in ids.tolist()], np.int64)[back]
            end = self._ends.setdefault(name, len(numbers) - 1 + self._parser.features[name])
            figures[f"{column}/new"] = len(numbers) - before
            figures[f"{column}/unknown"] = float((events[name] >= end).mean())
            figures[f"{column}/missing"] = float((events[name] < 0).mean())
        return found

    def _add_texts(self, texts: Sequence[tuple[str, int, str]]) -> None:
        """Writes the vocabulary with further rows."""
        path = self._folder / FIRST / VOCABULARY
        new = pa.table(list(map(list, zip(*texts))), names=["column", "id", "text"])
        if self._rows:
            new = pa.concat_tables([pq.read_table(path).slice(0, self._rows), new])
        pq.write_table(new, part := path.with_name(f"{path.name}.part"))
        put_in_place(part, path)
        self._rows = new.num_rows

    def _keep_waiting(self, waiting: Columns, chosen: NDArray[np.bool_]) -> Columns:
        """Goes on with some of the events, and with what belongs to them."""
        rest = {name: values[chosen] for name, values in waiting.items()}
        used, rest[_PLACE] = np.unique(rest[_PLACE], return_inverse=True)
        self._names = [self._names[place] for place in used.tolist()]
        for name, texts in self._texts.items():
            kept = set(rest[name].tolist()) if name in rest else set()
            self._texts[name] = {id: text for id, text in texts.items() if id in kept}
        self._blocks = [rest]
        return rest

    def _add_segment(self, events: Columns) -> None:
        number = 1 + max((_get_number(entry) for entry in self._entries), default=-1)
        users, counts, columns = _group(events)
        folder = self._make_segment(number)
        writer = SegmentWriter(folder, {n: _fit(n, values) for n, values in columns.items()})
        writer.add(users, counts, columns)
        times = columns["timestamp"]
        entry = {"name": folder.name, "events": writer.close()}
        entry |= {"first_time": int(times.min()), "last_time": int(times.max())}
        sync_tree(folder)
        self._entries.append(entry)
        first = plan_merge([entry["events"] for entry in self._entries])
        if first is not None:
            folder = self._make_segment(number + 1)
            merged = merge(folder.parent, list(columns), self._entries[first:], folder)
            sync_tree(folder)
            self._entries[first:] = [merged]

    def _make_segment(self, number: int) -> Path:
        """A path without what an interrupted commit left there."""
        folder = self._folder / STORE / name_segment(number)
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _write_first(self, events: Columns, manifest: Manifest) -> None:
        """The first window as a histories file: what it has are the columns of all."""
        users, counts, columns = _group({n: v for n, v in events.items() if n != EVENT_ID})
        schema = make_schema({n: pa.from_numpy_dtype(v.dtype) for n, v in columns.items()})
        folder = self._folder / FIRST
        folder.mkdir(exist_ok=True)
        offsets = pa.array(np.append(0, np.cumsum(counts)), pa.int32())
        lists = [pa.ListArray.from_arrays(offsets, values) for values in columns.values()]
        # sorted by their last events, like every histories file
        last = np.argsort(columns["timestamp"][np.cumsum(counts) - 1], kind="stable")
        table = pa.table([pa.array(users), *lists], schema=schema).take(pa.array(last))
        writer = HistoriesWriter(folder / f"{HISTORIES}.part", schema)
        writer.write(table)
        metadata = HistoriesMetadata(
            num_items=manifest["items"],
            num_users=len(users),
            num_events=manifest["events"],
            dropped_users=0,
            columns=tuple(columns),
            fingerprint=compute_digest(self._about, manifest["digest"]),
            no_labels={},
            read=(f"{self._source.name}: events as they come",),
            any_ids=True,
        )
        writer.close(metadata)
        os.replace(folder / f"{HISTORIES}.part", folder / HISTORIES)
        sync_tree(folder)

    # ---- what is kept

    def _write_waiting(self, rest: Columns) -> str | None:
        """Writes the events that wait. Returns the name of the file."""
        if not len(rest[_WINDOW]):
            return None
        rule = self._rule
        about: dict[str, Any] = {"names": self._names, "texts": self._texts}
        about |= {"late": rule.late, "dropped": rule.dropped}
        table = pa.table(rest).replace_schema_metadata({"about": json.dumps(about)})
        name = f"waiting-{self.count}.arrow"
        path = str(self._folder / name)
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        sync(self._folder / name)
        return name

    def _write_about(self) -> None:
        state = {
            "about": self._about,
            "unit": self._parser.unit,
            "columns": self._parser.columns,
            "window": self._rule.length,
            "lateness": self._rule.lateness,
            "tops": self._rule.tops,
            "closed": self._rule.closed,
            "count": self.count,
            "length": self._length,
            "rows": self._rows,
            "ends": self._ends,
            "waiting": self._waiting,
            "digest": self._digest,
        }
        columns = [name for name in self._parser.columns or () if name != "user_id"]
        write_about(self._folder / STORE, columns, self._digest, self._entries, stream=state)

    def _restore(self) -> None:
        """Goes on behind the last commit."""
        store = EventStore(self._folder / STORE)
        state = read_state(self._folder)
        for name, value in self._about.items():
            if (before := state["about"].get(name)) != value:
                raise ValueError(
                    f"{self._folder} has windows that were made with {name} {before!r}, and now it "
                    f"is {value!r}: give the same, or name another folder"
                )
        rule = self._rule
        self._entries, self.count, self._digest = store.entries, state["count"], state["digest"]
        self._parser.unit, self._parser.columns = state["unit"], state["columns"]
        rule.length, rule.lateness = state["window"], state["lateness"]
        rule.tops, rule.closed = state["tops"], state["closed"]
        self._length, self._rows = state["length"], state["rows"]
        self._waiting, self._ends = state["waiting"], state.get("ends", {})
        texts = self._folder / FIRST / VOCABULARY
        for name in self._ends:
            known = select_texts(pq.read_table(texts).slice(0, self._rows), name)
            ids = [] if known is None else hash_ids(known[1].to_pylist()).tolist()
            self._numbers[name] = {MISSING: -1} | {id: number for number, id in enumerate(ids)}
        append_at(self._folder / WINDOWS, self._length, b"")
        for path in self._folder.glob("waiting-*.arrow"):
            if path.name != self._waiting:
                path.unlink()
        for manifest in read_manifests(self._folder):
            self._source.restore(manifest["position"])
        for name in self._known.keys() & set(store.columns):
            found = [np.unique(segment.column(name)) for segment in store.segments]
            self._known[name] = np.unique(np.concatenate(found)).astype(np.int64)
        if EVENT_ID in store.columns:
            self._find_seen(store)
        if self._waiting is not None:
            self._read_waiting(self._folder / self._waiting)

    def _find_seen(self, store: EventStore) -> None:
        since = (self._rule.closed - self._remembered) * self._rule.length
        for segment, entry in zip(store.segments, store.entries, strict=True):
            if entry["last_time"] < since:
                continue
            windows = np.asarray(segment.column("timestamp")) // self._rule.length
            for window in np.unique(windows[windows * self._rule.length >= since]).tolist():
                ids = np.asarray(segment.column(EVENT_ID)[windows == window], np.int64)
                before = self._seen.get(window, np.zeros(0, np.int64))
                self._seen[window] = np.append(before, ids)

    def _read_waiting(self, path: Path) -> None:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
        about = json.loads(table.schema.metadata[b"about"])
        names = table.column_names
        self._blocks = [{n: table.column(n).to_numpy().copy() for n in names}]
        self._names = about["names"]
        for column, texts in about["texts"].items():
            self._texts[column] = {int(id): text for id, text in texts.items()}
        for name in ("late", "dropped"):
            counts = {int(window): count for window, count in about[name].items()}
            getattr(self._rule, name).update(counts)

    def close(self) -> None:
        self._source.close()


def read_state(folder: Path) -> dict[str, Any]:
    """How a stream was made (`about`), the `unit` of its times, its `columns`, and what is read."""
    text = (folder / STORE / ABOUT).read_text(encoding="utf-8")
    state: dict[str, Any] = json.loads(text)["stream"]
    return state


def read_manifests(folder: Path) -> Iterator[Manifest]:
    """The manifests of the windows of a stream that are over, in order."""
    state = read_state(folder)
    with open(folder / WINDOWS, "rb") as file:
        while file.tell() < state["length"]:
            yield json.loads(file.readline())


def _get_number(entry: Mapping[str, Any]) -> int:
    return int(entry["name"].rpartition("-")[2])


def _concat(blocks: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _group(events: Columns) -> tuple[_Ids, _Ids, Columns]:
    """Users, how many events each has, and the columns of events one user after another."""
    order = np.argsort(events["user_id"], kind="stable")
    users, counts = np.unique(events["user_id"], return_counts=True)
    names = [name for name in events if name[0] != "\0" and name != "user_id"]
    return users, counts, {name: events[name][order] for name in names}


def _fit(name: str, values: NDArray[Any]) -> np.dtype[Any]:
    """The smallest type of a column; times have 64 bits, as in every store."""
    if values.dtype.kind not in "iu" or name == "timestamp":
        return np.dtype(values.dtype)
    kind: np.dtype[Any] = np.dtype(fit_integers(int(values.min()), int(values.max())))
    return kind


def _sum(values: NDArray[Any]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(values).data, digest_size=16).hexdigest()
