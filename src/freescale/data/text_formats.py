"""Text formats of interactions: detects columns, separators and headers, and parses blocks of
text."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

FORMATS = ("parquet", "movielens", "amazon", "kuairand")
# KuaiRand; the place in this list is the bit of the action.
FEEDBACK = (
    "is_click",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "long_view",
    "is_profile_enter",
)
_AMAZON = {  # the names that the releases of 2014, 2018 and 2023 use
    "user": ("reviewerID", "user_id", "user"),
    "item": ("parent_asin", "asin", "item_id", "item"),
    "rating": ("overall", "rating"),
    "time": ("unixReviewTime", "timestamp"),
}
_BLOCK = 16 << 20  # bytes of text


@dataclass(frozen=True)
class TextLayout:
    """How to read one text file."""

    names: Sequence[str]  # all columns, in file order
    user: str
    item: str
    time: str
    rating: str | None = None
    feedback: Sequence[str] = ()
    text_ids: bool = False
    header: bool = True
    separator: bytes = b","  # b"{" for json lines
    unit: str | None = None  # of the timestamps, where the release says it

    def types(self) -> dict[str, pa.DataType]:
        ids = pa.string() if self.text_ids else pa.int64()
        types = {self.user: ids, self.item: ids, self.time: pa.int64()}
        if self.rating is not None:
            types[self.rating] = pa.float64()
        return types | {name: pa.int64() for name in self.feedback}


def detect_format(path: Path) -> str:
    """Detects one of `FORMATS` by the name and the first line of a file."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".parquet", ".pq")):
        return "parquet"
    if name.endswith((".dat", ".data")):
        return "movielens"
    if name.endswith((".json", ".jsonl")):
        return "amazon"
    fields = _split_line(_read_first_line(path), b",")
    if name.endswith(".csv") and {"video_id", "time_ms"} <= set(fields):
        return "kuairand"
    if name.endswith(".csv") and "movieId" in fields:
        return "movielens"
    if name.endswith(".csv") and (
        len(fields) == 4 or "parent_asin" in fields or "reviewerID" in fields
    ):
        return "amazon"
    raise ValueError(
        f"{path}: cannot tell the format from the name and the first line "
        f"{','.join(fields)[:80]!r}; "
        f"say which: {', '.join(FORMATS)}"
    )


def detect_layout(path: Path, format: str) -> TextLayout:
    """Detects how a text file of a format is laid out, by its first line."""
    line = _read_first_line(path)
    if format == "movielens":
        separator = next((s for s in (b"::", b"\t") if s in line), b",")
        fields = _split_line(line, separator)
        if "movieId" in fields or separator == b",":
            require_columns(path, ("userId", "movieId", "rating", "timestamp"), fields)
            return TextLayout(
                fields, "userId", "movieId", "timestamp", "rating", separator=separator, unit="s"
            )
        if len(fields) != 4:
            raise ValueError(
                f"{path}: {len(fields)} columns, not the 4 of "
                "user::item::rating::timestamp; see --format"
            )
        names = ["user", "item", "rating", "timestamp"]
        return TextLayout(
            names,
            "user",
            "item",
            "timestamp",
            "rating",
            header=False,
            separator=separator,
            unit="s",
        )
    if format == "kuairand":
        fields = _split_line(line, b",")
        require_columns(path, ("user_id", "video_id", "time_ms"), fields)
        return TextLayout(
            fields,
            "user_id",
            "video_id",
            "time_ms",
            feedback=[n for n in FEEDBACK if n in fields],
            unit="ms",
        )
    if line.lstrip().startswith(b"{"):
        try:
            fields = list(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}: the first line is not a JSON object ({error}); give json lines"
            ) from error
        return _make_amazon_layout(path, fields, separator=b"{", header=False)
    fields = _split_line(line, b",")
    if any(name in fields for names in _AMAZON.values() for name in names):
        return _make_amazon_layout(path, fields)
    if len(fields) != 4:
        raise ValueError(
            f"{path}: {len(fields)} columns, not the 4 of user,item,rating,timestamp; see --format"
        )
    # The release of 2018 has item first; an item there has 10 characters, a user more, beginning
    # with A.
    swapped = len(fields[0]) == 10 and len(fields[1]) > 10 and fields[1].startswith("A")
    names = (
        ["item", "user", "rating", "timestamp"]
        if swapped
        else ["user", "item", "rating", "timestamp"]
    )
    return _make_amazon_layout(path, names, header=False)


def _make_amazon_layout(
    path: Path, fields: Sequence[str], separator: bytes = b",", header: bool = True
) -> TextLayout:
    found = {role: next((n for n in names if n in fields), None) for role, names in _AMAZON.items()}
    require_columns(
        path, ["|".join(_AMAZON[role]) for role, name in found.items() if name is None], fields
    )
    user, item, rating, time = (str(found[role]) for role in ("user", "item", "rating", "time"))
    named = header or separator == b"{"
    # Seconds in 2014 and 2018, milliseconds in 2023; other files with names of their own may count
    # anything.
    unit = (
        "ms" if "parent_asin" in fields else "s" if time == "unixReviewTime" or not named else None
    )
    return TextLayout(
        fields,
        user,
        item,
        time,
        rating,
        text_ids=True,
        header=header,
        separator=separator,
        unit=unit,
    )


def parse_block(block: bytes, layout: TextLayout, path: Path) -> pa.Table:
    """Parses whole lines into a table of the columns that the layout names."""
    types = layout.types()
    try:
        if layout.separator == b"{":
            schema = pa.schema(types)
            options = pa.json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            )
            # no object straddles two of its blocks
            reading = pa.json.ReadOptions(block_size=len(block) + 1)
            return pa.json.read_json(
                pa.BufferReader(block), read_options=reading, parse_options=options
            )
        separator = layout.separator
        # two characters: more than the parser takes, and none of its values has a tab
        if separator == b"::":
            block, separator = block.replace(b"::", b"\t"), b"\t"
        return pa.csv.read_csv(
            pa.BufferReader(block),
            read_options=pa.csv.ReadOptions(column_names=list(layout.names)),
            parse_options=pa.csv.ParseOptions(delimiter=separator.decode()),
            convert_options=pa.csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowException as error:
        message = shorten_error(error)
        column = re.search(r"CSV column #(\d+)", message)
        if column:
            name = layout.names[int(column[1])]
            value = re.search(r"invalid value '(.*)'", message)
            kind = types[name]
            shown = repr(value[1]) if value else message
            raise ValueError(
                f"{path}: column {name!r} holds {shown}, not {kind}; mend or drop such rows"
            ) from error
        raise ValueError(f"{path}: {message}; mend or drop such rows") from error


def read_blocks(path: Path) -> Iterator[tuple[float, bytes]]:
    """Yields the share of the file read so far, and a block of whole lines."""
    size, carry = path.stat().st_size, b""
    try:
        with (
            open(path, "rb") as raw,
            gzip.open(raw) if path.name.endswith(".gz") else raw as stream,
        ):
            while chunk := stream.read(_BLOCK):
                head, newline, tail = chunk.rpartition(b"\n")
                if newline:
                    yield raw.tell() / size, carry + head + newline
                    carry = tail
                else:
                    carry += tail
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: a broken gzip file ({error}); fetch it again") from error
    if carry:
        yield 1.0, carry


def _read_first_line(path: Path) -> bytes:
    for _, block in read_blocks(path):
        return block.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].rstrip(b"\r")
    raise ValueError(f"{path}: the file is empty (0 lines); give a file with events")


def _split_line(line: bytes, separator: bytes) -> list[str]:
    return [
        field.strip().strip('"')
        for field in line.decode(errors="replace").split(separator.decode())
    ]


def require_columns(path: Path, needed: Sequence[str], present: Sequence[str]) -> None:
    """Raises ValueError if a needed column is missing."""
    missing = [name for name in needed if name not in present]
    if missing:
        raise ValueError(
            f"{path}: column {', '.join(map(repr, missing))} is missing; the file has "
            f"{', '.join(present)[:200]}; "
            "rename the column that holds it or name another format"
        )


def shorten_error(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).splitlines()[0][:200]
