"""Paths in object stores. They are pathlib's paths, whose methods ask the store."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PosixPath
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NoReturn

from freescale.stores.calls import connect, is_refused, repeat

_BLOCK = 4 << 20  # bytes of a request of a reader
_PART = 16 << 20  # bytes of a request of a writer
_URL = re.compile(r"(s3|gs|gcs|abfs|az):/{1,2}[^/]")


def is_store(path: object) -> bool:
    """Whether a path or URL is in an object store. A path that lost a slash of `s3://` is."""
    return _URL.match(str(path)) is not None


def as_path(path: str | Path) -> Path:
    """A path on a disk or in a store."""
    if isinstance(path, StorePath) or not is_store(path):
        return Path(path) if isinstance(path, str) else path
    if "@" in str(path).split("/")[:3][-1]:
        raise ValueError(
            f"{str(path).partition(':')[0]}://...: a path is written to logs; set credentials and "
            "options in the environment (AWS_PROFILE, AWS_ENDPOINT_URL)"
        )
    return StorePath(path)


class StorePath(PosixPath):
    """`s3://bucket/key`: what a folder or file of a disk is elsewhere. Folders exist as long as
    there is something in them; a file is there when it is complete. Programs that open a path by
    themselves are refused, so none writes to a disk by mistake."""

    _about: dict[str, Any] | None = None  # metadata of the entry, from a listing

    def __str__(self) -> str:
        first, *others = self.parts or (".",)
        return f"{first}//{'/'.join(others)}" if first.endswith(":") else "/".join(self.parts)

    def __fspath__(self) -> NoReturn:
        raise ValueError(f"{self} is in an object store, which cannot be used here: name a folder")

    @property
    def protocol(self) -> str:
        return self.parts[0].removesuffix(":")

    @property
    def key(self) -> str:
        """Bucket and key."""
        return "/".join(self.parts[1:])

    def call(self, verb: str, *given: Any, **how: Any) -> Any:
        """Calls a method of fsspec's file system on this key, until it succeeds."""
        system = connect(self.protocol, self)
        return repeat(str(self), lambda: getattr(system, verb)(self.key, *given, **how))

    # ---- what there is

    def ask(self) -> dict[str, Any]:
        """What the store knows of the object: type, size, ETag, LastModified; nothing if there is
        none."""
        if self._about is not None:
            return self._about
        try:
            return self.call("info")  # type: ignore[no-any-return]
        except FileNotFoundError:
            return {}

    def exists(self, **_: Any) -> bool:
        return bool(self.ask())

    def is_file(self, **_: Any) -> bool:
        return self.ask().get("type") == "file"

    def is_dir(self, **_: Any) -> bool:
        return self.ask().get("type") == "directory"

    def stat(self, **_: Any) -> Any:
        about = self.ask()
        if not about:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        seconds, size = about["LastModified"].timestamp(), int(about["size"])
        return SimpleNamespace(st_size=size, st_mtime=seconds, st_mtime_ns=int(seconds * 1e9))

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        found = self.call("ls", detail=True)
        return iter(sorted(self._open_all(one["name"] for one in found if one["name"] != self.key)))

    def glob(self, pattern: Any, **_: Any) -> Iterator[StorePath]:  # type: ignore[override]
        """Of this folder alone."""
        there = self.iterdir() if self.is_dir() else iter(())
        return (path for path in there if fnmatch(path.name, pattern))

    def rglob(self, pattern: Any, **_: Any) -> Iterator[StorePath]:  # type: ignore[override]
        """The files below. What the store says of each is remembered."""
        found = self.call("find", detail=True)
        for path in self._open_all(found):
            if found[path.key]["type"] == "file" and fnmatch(path.name, pattern):
                path._about = found[path.key]
                yield path

    def _open_all(self, keys: Any) -> list[StorePath]:
        return [StorePath(f"{self.protocol}://{key}") for key in sorted(keys)]

    def absolute(self) -> StorePath:
        return self

    resolve = absolute  # type: ignore[assignment]

    # ---- content

    def open(self, mode: str = "r", buffering: int = -1, **how: Any) -> Any:  # type: ignore[override]
        if mode == "wb":
            return self.call("open", "wb", block_size=_PART)
        if mode == "rb":  # read in blocks, the next one ahead
            kept = {"cache_type": "background", "cache_options": {"maxblocks": 4}}
            return self.call("open", "rb", block_size=_BLOCK, **kept)
        raise ValueError(f"{self}: an object is not opened with mode {mode!r}")

    def read_range(self, begin: int, end: int) -> bytes:
        found: bytes = self.call("cat_file", start=begin, end=end)
        if len(found) != end - begin:
            raise OSError(errno.EIO, f"{self}: {len(found)} of {end - begin} bytes were read")
        return found

    def read_bytes(self) -> bytes:
        return self.call("cat_file")  # type: ignore[no-any-return]

    def read_text(self, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, data: Any) -> int:
        self.call("pipe_file", bytes(data))
        return len(data)

    def write_text(self, data: str, *_: Any, **__: Any) -> int:
        return self.write_bytes(data.encode())

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Folders need not be made."""

    def unlink(self, missing_ok: bool = False) -> None:
        with suppress(FileNotFoundError):
            self.call("rm_file")

    def replace(self, target: Any) -> Any:
        self.call("copy", target.key)
        self.unlink()
        return target

    rename = replace

    # ---- conditions

    def read_version(self) -> tuple[bytes, str] | None:
        """Content and version (ETag) of an object; None if there is none."""
        from fsspec.asyn import sync

        bucket, _, key = self.key.partition("/")
        system = connect(self.protocol, self)

        def read() -> tuple[bytes, str]:
            found = system.call_s3("get_object", Bucket=bucket, Key=key)
            return sync(system.loop, found["Body"].read), str(found["ETag"])

        try:
            return repeat(str(self), read)
        except FileNotFoundError:
            return None

    def write_if(self, data: bytes, version: str | None) -> str | None:
        """Writes the object if it has a version (None: if there is none), and returns the new one;
        None if it has another. An answer that was lost is not mistaken for that."""
        bucket, _, key = self.key.partition("/")
        if self.protocol != "s3":
            raise ValueError(f"{self}: only S3 and compatible stores have the conditional writes "
                             "that a run needs: use s3://, or a folder on a disk")  # fmt: skip
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        system = connect(self.protocol, self)

        def write() -> str | None:
            try:
                about = dict(Bucket=bucket, Key=key, Body=data)
                return str(system.call_s3("put_object", **about, **condition)["ETag"])
            except OSError as error:
                missing = isinstance(error, FileNotFoundError) and version is not None
                if missing or isinstance(error, FileExistsError) or is_refused(error):
                    return None
                raise

        written = repeat(str(self), write)
        if written is None:
            there = self.read_version()
            written = there[1] if there is not None and there[0] == data else None
        return written


# ---- whole files and folders


def remove_tree(path: Path) -> None:
    """Removes a folder, if there is one."""
    if isinstance(path, StorePath):
        with suppress(FileNotFoundError):
            path.call("rm", recursive=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def upload(source: Path, target: StorePath) -> None:
    """Copies a file into a store, large ones in parts."""
    system = connect(target.protocol, target)
    repeat(str(target), partial(system.put_file, str(source), target.key))


def download(source: StorePath, target: Path) -> Path:
    """Copies a file out of a store."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    source.call("get_file", str(temporary))
    return temporary.replace(target)


@contextmanager
def writing(target: Path, last: str) -> Iterator[Path]:
    """A folder for files that belong to `target`: of a store, one on the disk whose files are moved
    there at the end, `last` after all others. What else the target's folder held is removed."""
    if not isinstance(target, StorePath):
        yield target
        return
    with TemporaryDirectory(prefix="freescale-") as name:
        yield Path(name)
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        files.sort(key=lambda path: path.name == last)
        own = {StorePath(target, path.relative_to(name).as_posix()): path for path in files}
        stale = [path for path in target.rglob("*") if path not in own]
        StorePath(target, last).unlink()  # without it, there is nothing
        for place, path in own.items():
            upload(path, place)
        for old in stale:
            old.unlink()
