"""Reads text files, compressed or not, as blocks of whole lines."""

from __future__ import annotations

import gzip
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

from freescale.data.ingest.sources import SourceFile

_BLOCK = 16 << 20  # bytes of text
_HEAD, _LINES = 1 << 20, 1000  # bytes and lines that the format is detected from
_LONGEST = 8  # blocks of the longest quoted value
_NEWLINE = b"\n"
_MARK = b"\xef\xbb\xbf"
_OPENS = re.compile(rb'(^|[,;|\t ])"')  # a mark inside a value, as in 5", opens nothing
_PACKED = {  # first bytes: program and fix
    b"BZh": ("bzip2", "unpack it, or use gzip"),
    b"\xfd7zXZ\0": ("xz", "unpack it, or use gzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unpack it, or use gzip"),
    b"\x1f\x8b": ("gzip", "let its name end with .gz"),
    b"PK\x03\x04": ("zip", "let its name end with .zip"),
}


@dataclass(frozen=True)
class TextBlock:
    """Whole lines of a file."""

    data: bytes
    line: int  # number of the first line, from 1
    share: float  # share of the file read so far
    quoted: bool = False  # quoted values may contain line breaks

    def locate(self, row: int) -> str:
        """The line on which a row starts; empty lines are not rows."""
        rows, is_open = -1, False
        for number, line in enumerate(self.data.split(b"\n")):
            rows += bool(not is_open and line.strip())
            if rows == row:
                return f"line {self.line + number}"
            if self.quoted and line.count(b'"') % 2:
                is_open = not is_open and bool(_OPENS.search(line))
        return f"line {self.line} or later"

    def skip_line(self) -> TextBlock:
        """The block without its first line."""
        rest = self.data.partition(b"\n")[2]
        return TextBlock(rest, self.line + 1, self.share, self.quoted)


def read_blocks(file: SourceFile, quoted: bool = False) -> Iterator[TextBlock]:
    """Yields the blocks of a file. With `quoted`, no block ends inside of quotation marks."""
    carry, line = b"", 1
    with _open(file) as (raw, stream):
        while chunk := _read(file, stream):
            if line == 1 and not carry:
                chunk = chunk.removeprefix(_MARK)
            lines, rest = _cut(carry + chunk, quoted)
            if quoted and len(rest) > _LONGEST * _BLOCK and rest.count(b'"') % 2:
                raise ValueError(
                    f"{file}, line {line + lines.count(_NEWLINE)}: a quotation mark is opened and "
                    "never closed; close or remove it"
                )
            carry = rest
            if lines:
                yield TextBlock(lines, line, min(raw.tell() / file.size, 1.0), quoted)
                line += lines.count(_NEWLINE)
    if carry:
        yield TextBlock(carry, line, 1.0, quoted)


def read_head(file: SourceFile) -> list[bytes]:
    """The first non-empty lines of a file, at least one, which show the format. ValueError if the
    file is empty, broken, or not the text that it should be."""
    head: list[bytes] = []
    size = 0
    for block in read_blocks(file):
        if not head:
            _refuse_other_text(file, block.data[:_HEAD])
        size += len(block.data)
        lines = block.data.split(b"\n", _LINES)[:_LINES]
        head += [line.rstrip(b"\r") for line in lines if line.strip()]
        if size >= _HEAD and head:
            break
    if not head:
        raise ValueError(f"{file}: the file is empty (0 lines); give a file with events")
    return head[:_LINES]


def _refuse_other_text(file: SourceFile, start: bytes) -> None:
    """Raises ValueError for input that would parse as garbage columns."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{file}: text in UTF-16; save the file as UTF-8")
    for signature, (program, fix) in _PACKED.items():
        if start.startswith(signature):
            raise ValueError(f"{file}: compressed with {program}; {fix}")
    line = start.partition(_NEWLINE)[0]
    if b"\0" in line:
        raise ValueError(f"{file}, line 1: holds bytes of 0, not text; give text or Parquet")
    if b"\r" in line.rstrip(b"\r"):
        raise ValueError(
            f"{file}, line 1: has carriage returns (\\r) inside; end lines with \\n "
            "(tr '\\r' '\\n' < FILE)"
        )


def _cut(text: bytes, quoted: bool) -> tuple[bytes, bytes]:
    """Whole lines, and the beginning of the next one."""
    end = text.rfind(_NEWLINE) + 1
    if quoted and text.count(b'"', 0, end) % 2:
        # The last mark before the cut opens a value that continues after it.
        end = text.rfind(_NEWLINE, 0, text.rfind(b'"', 0, end)) + 1
    return text[:end], text[end:]


@contextmanager
def _open(file: SourceFile) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The raw file, for progress, and the stream of its text."""
    with ExitStack() as stack:
        stream: Any = stack.enter_context(open(file.path, "rb"))
        raw = stream
        if file.member is not None:
            archive = stack.enter_context(zipfile.ZipFile(raw))
            stream = stack.enter_context(_open_member(file, archive))
        if (file.member or file.path.name.lower()).endswith(".gz"):
            stream = stack.enter_context(gzip.open(stream))
        yield raw, stream


def _open_member(file: SourceFile, archive: zipfile.ZipFile) -> IO[bytes]:
    assert file.member is not None
    try:
        return archive.open(file.member)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{file}: a broken zip file ({error}); fetch it again") from error
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or another compression
        raise ValueError(f"{file}: cannot be unpacked ({error}); unpack the archive") from error


def _read(file: SourceFile, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(_BLOCK)
    except (EOFError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile) as error:
        kind = "gzip" if file.member is None else "zip"
        raise ValueError(f"{file}: a broken {kind} file ({error}); fetch it again") from error
