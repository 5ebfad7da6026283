"""Writes that outlive the process and the machine's power."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Waits until a folder with all that is in it is on disk."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        sync(path)


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file that is whole or, if this is interrupted, as it was."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    put_in_place(part, path)


def put_in_place(part: Path, path: Path) -> None:
    """Renames a written file to its own name."""
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def append_at(path: Path, length: int, data: bytes) -> int:
    """Writes behind the first `length` bytes of a file, in place of what an interrupted write left
    there. Returns its new length."""
    with open(path, "ab") as file:
        file.truncate(length)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return length + len(data)
