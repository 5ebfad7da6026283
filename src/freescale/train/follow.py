"""Follows a source of events: rank 0 reads it, all ranks train the same windows.

While a window is awaited, rank 0 reads in a thread, and the ranks tell each other several times a
second that they are there, whether one has to stop or has failed, and which window comes next.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO, Any

from freescale.config import RunConfig
from freescale.config.data import DataConfig
from freescale.data.batches.loader import Histories
from freescale.data.features.sources import declare_events
from freescale.data.features.store import list_stored
from freescale.data.ingest.digest import compute_digest, read_contents
from freescale.data.ingest.sources import SourceFile, find_files
from freescale.data.store.event_store import EventStore
from freescale.data.store.window_index import WindowIndex
from freescale.data.stream.folder import FilesSource, FolderSource
from freescale.data.stream.parsing import Parser
from freescale.data.stream.source import Source
from freescale.data.stream.stream import (
    FIRST,
    HISTORIES,
    STORE,
    STREAM,
    Manifest,
    Stream,
    read_manifests,
    read_state,
)
from freescale.data.stream.windows import WindowRule
from freescale.data.workspace import make_folder
from freescale.pipeline.process_memory import trim_heap
from freescale.train.build import find_cache
from freescale.train.position import Position
from freescale.train.run_folder import lock_folder
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import RemoteError, run_on_rank_0

# Settings that decide what windows hold: they stay as they are while a run goes on.
_FIXED = ("columns", "missing", "window", "lateness", "late", "event_id", "event_id_windows")
_POLL = 0.25  # seconds between two messages of the ranks, and two looks at the source
_LONG = {"position", "partitions", "tops", "texts"}  # fields of a manifest that logs leave out
_KEYS = ("window", "number", "digest", "from", "to", "position", "texts")  # fields of a manifest


class Follower:
    """The windows of a run that follows a source. All methods are collectives, `stop` excepted.

    Attributes:
        window: the manifest of the window that is trained.
        stopping: whether this rank is to stop.
        again: whether the run has resumed at the end of the window.
    """

    def __init__(self, config: RunConfig, folder: Path, transport: Transport, resume: bool) -> None:
        self._config, self._transport = config, transport
        self.folder = folder / STREAM
        self.window: Manifest = {}
        self.stopping = self.again = False
        self._stream: Stream | None = None
        self._lock: IO[str] | None = None
        self._reading: Thread | None = None
        self._error: Exception | None = None
        run_on_rank_0(transport, lambda: self._open(resume), str(self.folder))

    def _open(self, resume: bool) -> None:
        data = self._config.data
        if resume and not (self.folder / STORE).is_dir():
            raise ValueError(
                f"{self.folder} is missing: the run resumes with the windows that it has kept there"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder)
        self._stream = open_stream(data, self._config.model.labels, self.folder)

    @property
    def histories(self) -> Path:
        """The events of the first window, as a histories file."""
        return self.folder / FIRST / HISTORIES

    def stop(self) -> None:
        """Ends the wait for a window, on all ranks. Any thread may call it."""
        self.stopping = True

    def find_next(self, after: int | None) -> Manifest | None:
        """The window that comes after one, by its number, as soon as it is over; None: the run
        ends. Errors of reading raise on all ranks."""
        begun = time.monotonic()  # start of the wait: while a window is trained, nothing is read
        while True:
            found, ended = None, False
            if self._transport.rank == 0 and self._error is None:
                found = self._find_known(after)
                if found is None:
                    ended = self._read_more(begun)
            error = None if self._error is None else str(self._error)
            message = {"found": found, "end": ended or self.stopping, "error": error}
            answers = gather_json(self._transport, message)
            if (problem := answers[0]["error"]) is not None:
                raise self._error or RemoteError(f"rank 0 stopped: {problem}")
            if any(answer["end"] for answer in answers):
                return None
            if answers[0]["found"] is not None:
                manifest: Manifest = answers[0]["found"]
                return manifest

    def _find_known(self, after: int | None) -> Manifest | None:
        """On rank 0: the window, if it is on disk."""
        if self._reading is not None:
            return None
        number = 0 if after is None else after + 1
        assert self._stream is not None
        if number >= self._stream.count:
            return None
        recent = self._stream.recent
        if number not in recent:
            manifests = read_manifests(self.folder)
            recent |= {each["number"]: each for each in manifests if each["number"] >= number}
        for old in [old for old in recent if old < number]:
            del recent[old]
        return recent[number]

    def _read_more(self, begun: float) -> bool:
        """On rank 0: reads in a thread, for a moment. Returns whether nothing more is to come."""
        stream, idle = self._stream, self._config.data.stop_when_idle
        assert stream is not None

        def read() -> None:
            try:
                stream.advance(_POLL)
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                self._error = error

        if self._reading is None:
            self._reading = Thread(target=read, name="freescale-stream", daemon=True)
            self._reading.start()
        self._reading.join(_POLL)
        if self._reading.is_alive():
            return False
        self._reading = None
        return idle is not None and time.monotonic() - max(begun, stream.last_read) > idle

    def begin(self, data: Histories) -> None:
        """Goes to the first window with samples, from the first one on."""
        self.open(data, self._first, 0)
        while not data.num_samples:
            found = self.find_next(self.window["number"])
            if found is None:
                raise ValueError(
                    f"{self._config.data.follow}: no window with a sample has come: users need "
                    "events before those that are predicted"
                )
            self.open(data, found, 0)

    def wait_for_first(self) -> None:
        """Waits for the first window. ValueError: there will be none."""
        found = self.find_next(None)
        if found is None:
            raise ValueError(
                f"{self._config.data.follow}: no window is over: the source ended, or the run was "
                "stopped, before an event later than the end of the first window came"
            )
        self._first = found

    def open(self, data: Histories, window: Manifest, first: int) -> None:
        """Goes on to a window, whose batches are numbered from `first` on."""
        self.window = window
        data.open_window(window["window"], first)
        trim_heap()  # a run without an end keeps no pages of what each window has freed
        if self._transport.rank == 0:
            assert data.time is not None
            store = EventStore(self.folder / STORE)
            WindowIndex(store, data.time.make_rule(data.sample)).forget(window["window"])

    def describe(self, data: Histories) -> dict[str, Any]:
        """The window and the position in the source, for checkpoints."""
        return {"first": data.first, **{key: self.window[key] for key in _KEYS}}

    def report(self) -> dict[str, Any]:
        """Figures of the window that was trained, for logs."""
        found = {key: value for key, value in self.window.items() if key not in _LONG}
        now = time.time()
        found |= {"trained": now, "lag": now - self.window["arrived"], "again": self.again}
        self.again = False
        return found

    def restore(self, position: Position, state: dict[str, Any]) -> None:
        """Goes to the window of a checkpoint. ValueError: it is not the one that is on disk."""
        found: list[Manifest] = []

        def look() -> None:
            found.extend(m for m in read_manifests(self.folder) if m["number"] == state["number"])
            if not found or found[0]["digest"] != state["digest"]:
                raise ValueError(
                    f"{self.folder} does not have window {state['number']} of the checkpoint as it "
                    "was trained: it is of another run, or was changed"
                )

        run_on_rank_0(self._transport, look)
        manifest = gather_json(self._transport, found[0] if found else None)[0]
        self.open(position.data, manifest, state["first"])

    def close(self) -> None:
        """No collective."""
        if self._reading is not None:
            self._reading.join(5)
        if self._stream is not None:
            self._stream.close()
        if self._lock is not None:
            self._lock.close()


def prepare_followed(config: RunConfig, run: Path, data: str | None) -> Path:
    """The histories of the first window of a run or, with `data`, of these files: windows of other
    events, as if they had come to the run."""
    stream = run / STREAM
    if data is None:
        return stream / FIRST / HISTORIES
    state, cache, labels = read_state(stream), find_cache(config.data), config.model.labels
    files = find_files(data, cache)
    contents = read_contents([file.path for file in files], cache / "digests", lambda share: None)
    known = [state[name] for name in ("about", "unit", "columns")]
    key = compute_digest([(each.digest, file.member) for each, file in zip(contents, files)], known)

    def make(folder: Path) -> None:
        open_stream(config.data, labels, folder, (files, state)).finish()

    return make_folder(cache, f"stream-{key}", f"windows of {data}", make) / FIRST / HISTORIES


def find_evaluated(run: Path, histories: Path, progress: Mapping[str, Any]) -> int:
    """The window that is evaluated: the one that came after that of a checkpoint, or the last one
    of other data (`prepare_followed`)."""
    stream = histories.parent.parent
    windows = [each["window"] for each in read_manifests(stream) if each["events"]]
    if stream == run / STREAM:
        windows = [window for window in windows if window > progress["stream"]["window"]][:1]
    if not windows:
        raise ValueError(
            f"{run}: no window has come that this checkpoint was not trained on: give other events "
            "with --data, or an earlier --checkpoint"
        )
    return int(windows[-1])


def open_stream(
    data: DataConfig,
    labels: str,
    folder: Path,
    given: tuple[Sequence[SourceFile], Mapping[str, Any]] | None = None,
) -> Stream:
    """Opens or begins the stream in a folder. `given`: instead of the source, files, and the state
    of the stream whose unit and columns they have.

    Raises:
        ValueError: there is no such source, or the folder has a stream with other settings.
    """
    assert data.follow is not None
    declared = declare_events(data, find_cache(data))
    context = {n for each in declared if each.source == "context" for n in each.stored_columns}
    features = {name: data.new_values for each in declared for name in list_stored(each)}
    features |= {name: 0 for each in declared if each.least > 1 for name in list_stored(each)}
    parser = Parser(data, labels, features, context)
    if given is None:
        source = _open_source(data, parser)
    else:
        source = FilesSource(given[0], parser)
        parser.unit, parser.columns = given[1]["unit"], given[1]["columns"]
    rule = WindowRule(0, drops=data.late == "drop")
    rule.oldest = data.event_id_windows if data.event_id else None
    about = {name: getattr(data, name) for name in _FIXED} | {"labels": labels}
    about |= {"features": [*features], "new_values": data.new_values} if features else {}
    return Stream(
        folder,
        source,
        parser,
        rule,
        (data.window_length, data.lateness_length),
        about,
        data.event_id_windows,
        data.idle_partition,
    )


def _open_source(data: DataConfig, parser: Parser) -> Source:
    assert data.follow is not None
    if data.follow.startswith("kafka://"):
        from freescale.data.stream.kafka import KafkaSource

        return KafkaSource(data.follow, parser, data.avro_schema)
    if "://" in data.follow:
        raise ValueError(f"--follow {data.follow}: name a folder, or kafka://BROKERS/TOPIC")
    return FolderSource(data.follow, parser)
