"""In every process of a run under a storm: reports the moments that it reaches to the storm, waits
there for what the storm does, and keeps the log of the samples that it trained.

    process -> storm    {"hello": ...}, {"step": 17}, {"reached": 3, ...}, {"missed": 3},
                        {"passed": "connected"}
    storm -> process    {"arm": ...}, {"go": 3}, {"jump": 3600}

Messages are lines of JSON over a Unix socket, which reaches across network namespaces.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from faults.moments import CHECKPOINT, MOMENTS, SNAPSHOT, STEP, watch, watch_moments
from freescale.batch import SequenceBatch
from freescale.sequences import Jagged

# Phases of a start, each with the moment of the slowest rank that ends it. The first step is behind
# them.
PHASES = {"process start": "connect", "rendezvous": "connected", "restore": "restored"}
LAUNCHER = -1  # in the place of a rank
_PATIENCE = 30.0  # seconds until a process goes on without the storm
_OF_START = {moment.name for moment in MOMENTS if moment.group not in (STEP, CHECKPOINT, SNAPSHOT)}


@dataclass(frozen=True)
class Start:
    """How a rank has started.

    Attributes:
        forked: from a process that has imported torch.
        await_server: waits until the ranks that come after it can be forked, too: after the first
            step, that is outside of what is timed. A run that fails has mostly trained for longer.
    """

    forked: bool = True
    await_server: Callable[[], None] = lambda: None


class Reporter:
    """Of one process."""

    def __init__(self, address: Path, logs: Path, rank: int, host: int, start: Start) -> None:
        self.rank, self._await_server = rank, start.await_server
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(address))
        self._armed: dict[str, Any] | None = None
        self._made = self._made_before = 0  # steps of this process, and when the fault was armed
        self._lock, self._answer = threading.Lock(), threading.Event()
        self._samples: list[str] = []
        self._log = -1
        if rank != LAUNCHER:
            path = logs / f"{time.time_ns()}-{rank}.jsonl"
            self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        hello = {"hello": rank, "pid": os.getpid(), "host": host, "forked": start.forked}
        self._send(hello)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """In a process that has inherited it."""
        self._socket.close()

    # ---- what the process reaches

    def visit(self, moment: str) -> None:
        """Waits for the storm if the fault that is armed happens here."""
        if moment in PHASES.values():
            self._send({"passed": moment})
        armed = self._armed
        if armed is None or not self._is_here(armed, moment):
            return
        with self._lock:
            if self._armed is not armed:
                return  # another thread was here before
            self._armed = None
            self._answer.clear()
        self._send({"reached": armed["number"], "moment": moment, "rank": self.rank})
        self._answer.wait(_PATIENCE)

    def _is_here(self, armed: Mapping[str, Any], moment: str) -> bool:
        return (
            moment == armed["moment"]
            and armed["rank"] in (None, self.rank)
            and self._made - self._made_before >= armed["after"]
        )

    def note_begin(self, _: None, run: Any, checkpoint: str) -> None:
        """After `begin_or_resume`."""
        self._write({"began": run.position.step, "world": run.transport.world})

    def note_samples(self, _: Any, micro: list[SequenceBatch], *rest: Any) -> None:
        """Before `Schedule._compute`."""
        self._samples = [digest for batch in micro for digest in digest_samples(batch)]

    def note_step(self, result: Any, *_: Any) -> None:
        """After `Schedule._make_result`."""
        entry = {"step": result.step, "batch": result.batch_number, "loss": result.loss.hex()}
        self._write(entry | {"samples": self._samples})
        self._made += 1
        self._send({"step": result.step})
        if self._made == 1:
            self._await_server()
        armed = self._armed
        if armed is not None and armed["moment"] in _OF_START:  # this attempt had no such moment
            self._armed = None
            self._send({"missed": armed["number"]})

    # ---- messages

    def _write(self, entry: Mapping[str, Any]) -> None:
        os.write(self._log, json.dumps(entry).encode() + b"\n")

    def _send(self, entry: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(entry).encode() + b"\n")
        except OSError:  # the storm is gone: so is everything else
            os._exit(1)

    def _listen(self) -> None:
        with self._socket.makefile("r") as lines:
            for line in lines:
                told = json.loads(line)
                if "arm" in told:
                    self._made_before, self._armed = self._made, told["arm"]
                elif "jump" in told:
                    _jump_clock(told["jump"])
                elif "go" in told:
                    self._answer.set()


def digest_samples(batch: SequenceBatch) -> list[str]:
    """Of each sample a digest of its ids and of its random key, which tells epochs apart."""
    columns = {name: part for name, part in batch.parts().items() if isinstance(part, Jagged)}
    keys = batch.keys.tolist() if batch.keys is not None else [0] * len(batch)
    found = []
    for sample, key in enumerate(keys):
        digest = hashlib.blake2b(str(key).encode(), digest_size=8)
        for part in columns.values():
            begin, end = (int(part.offsets[sample + edge]) for edge in (0, 1))
            digest.update(part.values[begin:end].cpu().numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def _jump_clock(seconds: float) -> None:
    """The system's time, which may be set; the monotonic clock never is."""
    true = time.time
    time.time = lambda: true() + seconds


# ---- of this process

_reporters: list[Reporter] = []  # the last is this process's, those before belong to its parents


def report_to(address: Path, logs: Path, rank: int, host: int, start: Start | None = None) -> None:
    """Makes this process report; one that it forks has to call this again."""
    if not _reporters:
        watch_moments(lambda moment: _reporters[-1].visit(moment))
        for function, call, after in (
            ("train.trainer:begin_or_resume", Reporter.note_begin, True),
            ("pipeline.schedule:Schedule._compute", Reporter.note_samples, False),
            ("pipeline.schedule:Schedule._make_result", Reporter.note_step, True),
        ):
            watch(function, partial(_call, call), after=after)
    for inherited in _reporters:
        inherited.close()
    _reporters.append(Reporter(address, logs, rank, host, start or Start()))


def _call(note: Callable[..., None], *arguments: Any) -> None:
    note(_reporters[-1], *arguments)
