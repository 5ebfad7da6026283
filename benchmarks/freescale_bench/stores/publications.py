"""Publishes checkpoints in a store until it is killed; and writers that were taken over."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import freescale
from freescale.embedding.optimizers import Adagrad
from freescale.stores.path import StorePath
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.stored import StoredFolder
from freescale.transport.local import LocalTransport
from freescale_bench.common.results import Row

_ROWS, _WIDTH = 2000, 16
_LATE_STEP, _STOPPED_S = 10, 2.0
# clean processes: connections to stores do not survive a fork
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["freescale_bench.stores.publications"])
_LONGEST_S = 1.5  # until a kill, after a writer is ready


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(_ROWS, _WIDTH, device="meta")
        self.layer = nn.Linear(_WIDTH, 1)


def kill_writers(folder: StorePath, kills: int, notes: Path, seed: int = 0) -> list[Row]:
    """Kills a process that publishes one checkpoint after another, and starts the next one, which
    first verifies what there is, until so many kills have hit a publication. A row for each."""
    draw, rows = random.Random(seed), list[Row]()
    last = False
    while not last:
        last = sum(row["during"] for row in rows) >= kills
        notes.unlink(missing_ok=True)
        given = folder, notes, last, dict(os.environ)
        writer = _CONTEXT.Process(target=_publish, args=given)
        writer.start()
        _wait_for(notes, "ready", writer)
        if not last:
            time.sleep(draw.uniform(0, _LONGEST_S))
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
        writer.join(120)
        ready, begun, saved = (_read(notes, name) for name in ("ready", "begun", "saved"))
        if not ready:
            raise RuntimeError(f"a writer ended with status {writer.exitcode} before it was ready")
        before = rows[-1]["saved"] if rows else 0
        rows.append({
            "found": ready[0], "begun": max(begun, default=ready[0]),
            "saved": max(saved, default=ready[0]), "lost": ready[0] < before,
            "during": max(begun, default=0) > max(saved, default=0),
        })  # fmt: skip
    return rows


def _publish(folder: StorePath, notes: Path, once: bool, environment: dict[str, str]) -> None:
    """Restores the last checkpoint, which says its step in its weights, and writes others."""
    os.environ.update(environment)
    torch.manual_seed(0)
    transport = LocalTransport()
    ids = {"item": ["history"]}
    model = freescale.parallelize(_Model(), ids, Adagrad(lr=0.1), transport=transport)
    model.tables.place()
    dense = torch.optim.SGD(model.dense_parameters(), lr=0.1)
    checkpoints = Checkpoints(folder, transport, keep=2)
    checkpoints.claim()
    found, step = checkpoints.last_intact(), 0
    weight = model.module.get_parameter("layer.weight")
    if found is not None:
        step = int(checkpoints.load(found, model, dense)["step"])
        if not (weight == step).all():
            raise RuntimeError(f"the checkpoint of step {step} holds another one")
    _note(notes, "ready", step)
    for _ in range(1 if once else 10_000):
        step += 1
        with torch.no_grad():
            weight.fill_(step)
        _note(notes, "begun", step)
        checkpoints.save(model, dense, {"step": step})
        _note(notes, "saved", step)
    os._exit(0)  # as a process that ends without releasing its claim


def _note(notes: Path, name: str, step: int) -> None:
    with open(notes, "a", encoding="utf-8") as file:
        file.write(json.dumps([name, step]) + "\n")


def _read(notes: Path, name: str) -> list[int]:
    if not notes.exists():
        return []
    whole = notes.read_text().splitlines(True)
    lines = [json.loads(line) for line in whole if line[-1:] == "\n"]
    return [step for kind, step in lines if kind == name]


def write_late(folder: StorePath, writers: int, notes: Path) -> Row:
    """Writers of a process that is stopped in the middle of its checkpoints, and goes on when
    others have taken over and published newer ones. Counts the attempts that were refused, and
    newer checkpoints that were overwritten or lost files."""
    notes.unlink(missing_ok=True)
    places = [StorePath(folder, f"{number}") for number in range(writers)]
    late = _CONTEXT.Process(target=_be_late, args=(places, notes, dict(os.environ)))
    late.start()
    _wait_for(notes, "ready", late)
    assert late.pid is not None
    os.kill(late.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(writers) as pool:  # each waits until the claim is not renewed
        published = list(pool.map(_take_over, range(writers), places))
    os.kill(late.pid, signal.SIGCONT)
    late.join(600)
    overwritten = 0
    for place, (newer, path, steps) in zip(places, published, strict=True):
        data = path / "data"
        whole = data.is_file() and data.read_bytes() == b"newer"
        overwritten += not whole or _read_steps(place) != steps
        newer.close()
    refused = len(_read(notes, "refused"))
    return {"late writers": writers, "attempts": 2 * writers, "refused": refused,
            "overwritten": overwritten, "ended": late.exitcode == 0}  # fmt: skip


def _take_over(number: int, place: StorePath) -> tuple[StoredFolder, Path, Any]:
    """Publishes the step that the late writer has begun, or a later one."""
    newer = StoredFolder(place)
    newer.claim()
    step = _LATE_STEP + number % 2
    path = place / newer.begin(step)
    (path / "data").write_bytes(b"newer")
    newer.finish(step)
    return newer, path, _read_steps(place)


def _read_steps(place: StorePath) -> Any:
    return json.loads(StorePath(place, "manifest.json").read_text())["steps"]


def _be_late(places: list[StorePath], notes: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    writers = [StoredFolder(place) for place in places]
    for writer in writers:
        writer.claim()
        name = writer.begin(_LATE_STEP)
        (writer.folder / name / "data").write_bytes(b"late")
    _note(notes, "ready", 0)
    time.sleep(_STOPPED_S)  # stopped meanwhile
    for number, writer in enumerate(writers):
        for act in (partial(writer.finish, _LATE_STEP), partial(writer.remove, [_LATE_STEP])):
            try:
                act()
            except ValueError:
                _note(notes, "refused", number)
        with suppress(ValueError):
            writer.clear()
    os._exit(0)


def _wait_for(notes: Path, name: str, process: Any) -> None:
    until = time.monotonic() + 120
    while process.is_alive() and not _read(notes, name):
        if time.monotonic() > until:
            process.kill()
        time.sleep(0.01)
