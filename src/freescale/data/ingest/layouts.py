"""The layout of a file of events: format and columns, from its name and first lines."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from freescale.config.columns import ORDER
from freescale.config.data import FORMATS
from freescale.data.ingest import yambda
from freescale.data.ingest.column_names import find_roles, require_roles
from freescale.data.ingest.sources import SourceFile
from freescale.data.ingest.text_blocks import read_head
from freescale.data.ingest.timestamps import guess_unit
from freescale.data.values import reads_as_number

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
LINES = ("pairs", "sequences", "user-sequences")  # formats of ids between blanks
_TYPED = re.compile(r"(.+):(token|token_seq|float|float_seq)")  # a column of RecBole's atomic files
_MOST, _FEW = 0.9, 10  # share and number of lines that set the rule for all
_AMAZON = {  # the names that the releases of 2014, 2018 and 2023 use
    "user": ("reviewerID", "user_id", "user"),
    "item": ("parent_asin", "asin", "item_id", "item"),
    "rating": ("overall", "rating"),
    "time": ("unixReviewTime", "timestamp"),
}


@dataclass(frozen=True)
class Layout:
    """How to read one file."""

    format: str
    names: Sequence[str]  # all columns, in file order
    roles: Mapping[str, str]  # role -> column; without a time rows are in order of time
    separator: bytes = b","
    header: bool = True
    quoted: bool = True  # values may be quoted
    padded: bool = False  # blanks follow the separators and are no part of values
    unit: str | None = None  # of the timestamps, if the release documents it
    feedback: Sequence[str] = ()
    types: Mapping[str, pa.DataType] = field(default_factory=dict)  # of JSON, from the first lines
    declared: Mapping[str, str] = field(default_factory=dict)  # RecBole's types, from the header

    @property
    def outcomes(self) -> set[str]:
        """Columns that say what a user did, which no request knows."""
        rated = {self.roles[role] for role in ("action", "rating") if role in self.roles}
        return (rated | set(self.feedback)) - {yambda.ORGANIC}

    @property
    def is_parquet(self) -> bool:
        return self.format in ("parquet", "yambda")

    @property
    def is_json(self) -> bool:
        return self.separator == b"{"


def detect_layout(file: SourceFile, format: str, given: Mapping[str, str]) -> Layout:
    """Detects the layout of a text file, from `format` (or `auto`) and `given` columns of roles.
    ValueError if the format is unclear, or a column is missing."""
    lines = read_head(file)
    if format == "auto":
        format = _detect_format(file, lines, given)
    if format in LINES:
        return Layout(format, ("user", "item"), {"user": "user", "item": "item"}, b" ", False)
    if format == "movielens":
        return _lay_out_movielens(file, lines)
    if format == "kuairand":
        names = split_line(lines[0], b",")
        require_columns(file, ("user_id", "video_id", "time_ms"), names)
        roles = {"user": "user_id", "item": "video_id", "time": "time_ms"}
        return Layout(format, names, roles, unit="ms", feedback=[n for n in FEEDBACK if n in names])
    if format == "amazon":
        return _lay_out_amazon(file, lines)
    if format == "jsonl" or lines[0].lstrip().startswith(b"{"):
        types = _read_types(file, lines)
        layout = _lay_out(file, "jsonl", list(types), given, b"{", header=False)
        return replace(layout, types=types)
    separator = find_separator(lines)
    names = split_line(lines[0], separator)
    numbers = [name for name in given.values() if name and name != ORDER]
    unnamed: list[str] = []  # names of columns without a header
    if numbers and all(map(str.isdecimal, numbers)):
        unnamed = [str(number + 1) for number in range(len(names))]
    elif not given and _looks_like_events(lines, separator):
        unnamed = ["user", "item", "time"]
    if unnamed:
        return _lay_out(file, "csv", unnamed, given, separator, header=False)
    layout = lay_out_columns(file)
    found = _lay_out(file, "csv", layout.names, given, separator, quoted=layout.quoted)
    return replace(found, padded=layout.padded, declared=layout.declared)


def lay_out_columns(file: SourceFile) -> Layout:
    """The layout of JSON lines or text with a header, of any columns without roles."""
    lines = read_head(file)
    if lines[0].lstrip().startswith(b"{"):
        types = _read_types(file, lines)
        return Layout("jsonl", list(types), {}, b"{", header=False, types=types)
    separator = find_separator(lines)
    names = split_line(lines[0], separator)
    typed = [_TYPED.fullmatch(name) for name in names]
    if all(typed):
        declared = {match[1]: match[2] for match in typed if match}
        names = [match[1] for match in typed if match]
        return Layout("csv", names, {}, separator, quoted=False, declared=declared)
    padded = lines[0].count(separator + b" ") == lines[0].count(separator) > 0
    return Layout("csv", names, {}, separator, padded=padded)


def _detect_format(file: SourceFile, lines: Sequence[bytes], given: Mapping[str, str]) -> str:
    name, first = file.name, lines[0].lstrip()
    if first.startswith(b"{"):
        keys = set(_read_types(file, lines))
        known = not given and bool(keys & {"reviewerID", "parent_asin"})
        return "amazon" if known and _is_amazon(list(keys)) else "jsonl"
    if first.startswith(b"[") and name.endswith((".json", ".jsonl", ".ndjson")):
        raise ValueError(
            f"{file}: a JSON array; write one object a line (jq -c '.[]' FILE > FILE.jsonl)"
        )
    if name.endswith((".json", ".jsonl", ".ndjson")):
        raise ValueError(f"{file}, line 1: not a JSON object: {first[:60]!r}; give JSON lines")
    separator = find_separator(lines)
    fields = split_line(lines[0], separator)
    if given or all(map(_TYPED.fullmatch, fields)):
        return "csv"
    if name.endswith((".dat", ".data")) and len(fields) == 4 and separator in (b"::", b"\t"):
        return "movielens"
    commas, names = separator == b",", set(fields)
    if commas and {"user_id", "video_id", "time_ms"} <= names:
        return "kuairand"
    if separator in (b",", b"\t", b"::") and {"userId", "movieId", "rating", "timestamp"} <= names:
        return "movielens"
    if commas and names & {"reviewerID", "parent_asin"} and _is_amazon(fields):
        return "amazon"
    if len(find_roles(fields, {}, ("user", "item"))) == 2:
        return "csv"
    counts = Counter(len(line.split()) for line in lines)
    numbers = sum(map(reads_as_number, fields))
    if separator == b"," and len(fields) == 4 and reads_as_number(fields[3]):
        return "amazon"
    if separator in (b"\t", b"::") and len(fields) == 4 and numbers == 4:
        return "movielens"
    if _looks_like_events(lines, separator):
        return "csv"
    if separator in (b" ", b"\t") and set(counts) == {2}:
        return "pairs"
    if separator in (b" ", b"\t") and counts[2] >= _MOST * len(lines) > _FEW:
        row = next(row for row, line in enumerate(lines) if len(line.split()) != 2)
        shown = lines[row][:60].decode(errors="replace")
        raise ValueError(
            f"{file}, line {row + 1} (empty ones not counted): has {len(lines[row].split())} "
            f"values, not a user and an item as most: {shown!r}; "
            "fix it, or say what lines are: --format sequences or user-sequences"
        )
    if separator in (b" ", b"\t") and all(token.isdigit() for token in b" ".join(lines).split()):
        heads = [line.split()[0] for line in lines]
        counts_from = {start: [b"%d" % (start + i) for i in range(len(heads))] for start in (0, 1)}
        numbered = len(lines) > 2 and heads in counts_from.values()
        return "user-sequences" if numbered else "sequences"
    if not numbers and separator in (b",", b";", b"|", b"\t") and find_roles(fields, {}):
        return "csv"  # a header that is not fully recognised: a later error names the gaps
    shown = separator.decode().join(fields)[:80]
    raise ValueError(
        f"{file}: cannot tell the format from the name and the first line {shown!r}; say which "
        f"column is which (--columns user=NAME,item=NAME,time=NAME; numbers from 1 where there is "
        f"no header), or the format: --format {', '.join(FORMATS)}"
    )


def _lay_out(
    file: SourceFile,
    format: str,
    names: Sequence[str],
    given: Mapping[str, str],
    separator: bytes,
    header: bool = True,
    quoted: bool = True,
) -> Layout:
    roles = find_roles(names, given)
    require_roles(file, names, given, roles)
    if roles["time"] == ORDER:
        del roles["time"]
    if "action" in roles and "rating" not in given:
        roles.pop("rating", None)  # a rating makes actions only if there are none
    return Layout(format, names, roles, separator, header, quoted)


def _lay_out_movielens(file: SourceFile, lines: Sequence[bytes]) -> Layout:
    separator = next((s for s in (b"::", b"\t") if s in lines[0]), b",")
    names = split_line(lines[0], separator)
    if "movieId" in names or separator == b",":
        require_columns(file, ("userId", "movieId", "rating", "timestamp"), names)
        roles = {"user": "userId", "item": "movieId", "time": "timestamp", "rating": "rating"}
        return Layout("movielens", names, roles, separator, unit="s")
    _require_four(file, names, "user::item::rating::timestamp")
    names = ["user", "item", "rating", "timestamp"]
    roles = {"user": "user", "item": "item", "time": "timestamp", "rating": "rating"}
    return Layout("movielens", names, roles, separator, header=False, quoted=False, unit="s")


def _lay_out_amazon(file: SourceFile, lines: Sequence[bytes]) -> Layout:
    if lines[0].lstrip().startswith(b"{"):
        types = _read_types(file, lines)
        return replace(_make_amazon(file, list(types), b"{", header=False), types=types)
    names = split_line(lines[0], b",")
    if any(name in names for known in _AMAZON.values() for name in known):
        return _make_amazon(file, names)
    _require_four(file, names, "user,item,rating,timestamp")
    # Release 2018 starts with the item: 10 characters; users are longer and begin with A.
    swapped = len(names[0]) == 10 and len(names[1]) > 10 and names[1].startswith("A")
    both = ["item", "user"] if swapped else ["user", "item"]
    return _make_amazon(file, [*both, "rating", "timestamp"], header=False)


def _require_four(file: SourceFile, names: Sequence[str], expected: str) -> None:
    if len(names) != 4:
        raise ValueError(f"{file}: {len(names)} columns, not the 4 of {expected}; see --format")


def _make_amazon(
    file: SourceFile, names: Sequence[str], separator: bytes = b",", header: bool = True
) -> Layout:
    found = {role: next((n for n in known if n in names), "") for role, known in _AMAZON.items()}
    require_columns(file, ["|".join(_AMAZON[r]) for r, name in found.items() if not name], names)
    named = header or separator == b"{"
    # Seconds in 2014 and 2018, milliseconds in 2023; named columns of other files: unknown.
    seconds = found["time"] == "unixReviewTime" or not named
    unit = "ms" if "parent_asin" in names else "s" if seconds else None
    return Layout("amazon", names, found, separator, header, unit=unit)


def _is_amazon(names: Sequence[str]) -> bool:
    return all(set(known) & set(names) for known in _AMAZON.values())


def _read_types(file: SourceFile, lines: Sequence[bytes]) -> dict[str, pa.DataType]:
    """Keys of the first objects (some may lack one) with their types; null if unknown."""
    types: dict[str, pa.DataType] = {}
    known = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise ValueError(f"a {type(found).__name__}")
        except ValueError as error:
            raise ValueError(
                f"{file}, line {number}: not a JSON object ({error}); give JSON lines"
            ) from error
        for name, value in found.items():
            kind = known.get(type(value), pa.null())
            mixed = {types.get(name), kind} == {pa.int64(), pa.float64()}
            if types.get(name, pa.null()) == pa.null() or mixed:
                types[name] = pa.float64() if mixed else kind
    return types


def _looks_like_events(lines: Sequence[bytes], separator: bytes) -> bool:
    """Whether lines are user, item and a time of plausible magnitude."""
    rows = [split_line(line, separator) for line in lines]
    return all(len(row) == 3 and reads_as_number(row[2]) for row in rows) and all(
        guess_unit(float(row[2])) is not None for row in rows
    )


def find_separator(lines: Sequence[bytes]) -> bytes:
    """The column separator: the most frequent sign of the first line."""
    if b"::" in lines[0]:
        return b"::"
    if b"\t" in lines[0]:
        return b"\t"
    counts = {sign: lines[0].count(sign) for sign in (b",", b";", b"|")}
    sign = max(counts, key=lambda sign: counts[sign])
    return sign if counts[sign] else b" " if b" " in lines[0].strip() else b","


def split_line(line: bytes, separator: bytes) -> list[str]:
    """The fields of a line, such as a CSV header."""
    text, sign = line.decode(errors="replace"), separator.decode()
    fields = text.split(sign) if len(sign) > 1 else next(csv.reader([text], delimiter=sign))
    return [field.strip().strip('"') for field in fields]


def require_columns(file: object, needed: Sequence[str], present: Sequence[str]) -> None:
    """Raises ValueError if a needed column is missing."""
    missing = [name for name in needed if name not in present]
    if missing:
        raise ValueError(
            f"{file}: column {', '.join(map(repr, missing))} is missing; the file has "
            f"{', '.join(present)[:200]}; name the columns with --columns, or another --format"
        )
