"""The folder of a run or an export in a store, and its files on this machine.

Checkpoints are written into the store. All else of a run is small and is written all the time:
config.json, metrics.jsonl, the ledger, TensorBoard's files. These are in a folder of the machine,
which uploads what has changed when the run begins, after each checkpoint and at the end. The lock,
the record of attempts and snapshots stay there.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from freescale.file_lock import lock
from freescale.folders import find_cache_folder
from freescale.stores.path import StorePath, as_path, download, upload

_MARK = ".store"  # file with the URL of the run, and the files that are the same there
_LOCAL = {_MARK, ".lock", ".attempt", ".sync", "ended", "checkpoints"}


def open_run(folder: Path | str, trains: bool = False) -> Path:
    """The folder of a run or an export; of one in a store, a folder with its files except
    checkpoints: in the user's cache, or for a run that trains under runs/."""
    store = as_path(folder)
    if not isinstance(store, StorePath):
        return store
    if trains:
        local = Path("runs").joinpath(*store.parts[1:])
    else:
        name = blake2b(str(store).encode(), digest_size=8).hexdigest()
        local = find_cache_folder() / "runs" / name / store.name
    found = list(store.rglob("*"))
    if not found and not trains:
        raise ValueError(f"{store} is not the folder of a run: there is no such folder")
    local.mkdir(parents=True, exist_ok=True)
    with open(local / ".sync", "w") as file:
        lock(file.fileno())  # ranks of a machine do the same
        known = _read_mark(local).get("files", {})
        for path in found:
            inside, version = path.relative_to(store).parts, str(path.ask().get("ETag"))
            name, target = "/".join(inside), local.joinpath(*inside)
            same = known.get(name, [None])[0] == version and target.exists()
            if inside[0] not in _LOCAL and not same:
                download(path, target)
                known[name] = [version, *_measure(target)]
        _write_mark(local, store, known)
    return local


def upload_run(local: Path) -> None:
    """Uploads what has changed in the folder of a run, if it belongs into a store."""
    store = find_store(local)
    if store is None:
        return
    known = _read_mark(local)["files"]
    for path in sorted(local.rglob("*")):
        inside = path.relative_to(local)
        if inside.parts[0] in _LOCAL or not path.is_file() or path.suffix == ".tmp":
            continue
        name, measured, target = str(inside), _measure(path), StorePath(store, str(inside))
        if known.get(name, [None])[1:] != measured:
            upload(path, target)
            known[name] = [str(target.ask().get("ETag")), *measured]
    _write_mark(local, store, known)


def find_store(local: Path) -> StorePath | None:
    """Where the files of a run's folder belong; None: here."""
    store = _read_mark(local).get("store")
    return None if store is None else StorePath(store)


def find_checkpoints(run: Path) -> Path:
    """The folder of a run's checkpoints."""
    return (find_store(run) or run) / "checkpoints"


def _measure(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]


def _read_mark(local: Path) -> Any:
    path = local / _MARK
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write_mark(local: Path, store: StorePath, files: Any) -> None:
    temporary = local / f"{_MARK}.{os.getpid()}"
    temporary.write_text(json.dumps({"store": str(store), "files": files}), encoding="utf-8")
    temporary.replace(local / _MARK)
