"""Words that made the prose of this project hard to read, and what to write instead."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE, BENCHMARKS = ROOT / "src" / "freescale", ROOT / "benchmarks" / "freescale_bench"

AVOIDED = {
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "mending": "fixing",
    "settle": "apply, flush, wait or finish",
    "settles": "applies, flushes, waits or finishes",
    "settled": "applied, flushed or finished",
    "settling": "applying, flushing, waiting or finishing",
    "beside": "next to; while or alongside, of what happens at the same time",
    "keeper": "snapshot holder",
    "keepers": "snapshot holders",
    "told": "output, or the argument's name",
    "said": "message",
    "asked": "target, or requested",
}
WORD = re.compile(rf"\b(?:{'|'.join(AVOIDED)})\b", re.IGNORECASE)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of snake_case and CamelCase

# Keys of files on disk: of a target in results, of an interval in metrics.jsonl.
FORMATS = {"asked"}
MEASURED = re.compile(r"<!-- measured:.*?<!-- /measured -->", re.DOTALL)
# docs/log.md is history: its entries up to this date stay as they were written.
LOG, LOG_KEPT_UNTIL = ROOT / "docs" / "log.md", "2026-11-17"

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(path for path in (ROOT / "examples").rglob("*.*") if path.suffix != ".pyc"),
]
MODULES = [path for folder in (SOURCE, BENCHMARKS) for path in sorted(folder.rglob("*.py"))]
TEXTS = [
    path
    for pattern in ("*.toml", "*.html", "*.js", "*.c", "*.h")
    for folder in (SOURCE, BENCHMARKS)
    for path in sorted(folder.rglob(pattern))
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def find_words(text: str) -> list[str]:
    text = text.replace("key `asked`", "")  # of FORMATS, where a docstring names it
    return [f"{word}: write {AVOIDED[word.lower()]}" for word in WORD.findall(text)]


def find_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.alias(name=name):
                yield name


def find_bad_names(text: str, path: str) -> list[str]:
    names = {*find_names(ast.parse(text)), *Path(path).with_suffix("").parts}
    parts = ((name, part.lower()) for name in names for part in PART.findall(name))
    return sorted(f"{name}: write {AVOIDED[part]}" for name, part in parts if part in AVOIDED)


def find_bad_text(text: str) -> list[str]:
    """In comments and strings, docstrings and parts of f-strings among them."""
    strings = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [
        (token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT
    ]
    return [
        f"line {line}: {found}"
        for line, content in (*strings, *comments)
        if content not in FORMATS
        for found in find_words(content)
    ]


def read_page(path: Path) -> str:
    """Without the tables that are generated from results: files on disk keep their claims."""
    text = MEASURED.sub("", path.read_text(encoding="utf-8"))
    if path != LOG:
        return text
    entries = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(entry for entry in entries if _read_date(entry) > LOG_KEPT_UNTIL)


def _read_date(entry: str) -> str:
    found = re.search(r"\d{4}-\d{2}-\d{2}", entry.partition("\n")[0])
    return found[0] if found else ""


def collect(paths: Iterable[Path], find: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    return {name_of(path): found for path in paths if (found := find(path))}


def test_pages_avoid_them():
    assert collect(PAGES, lambda page: find_words(read_page(page))) == {}


def test_names_avoid_them():
    assert collect(MODULES, lambda path: find_bad_names(path.read_text(), name_of(path))) == {}


def test_messages_docstrings_and_comments_avoid_them():
    assert collect(MODULES, lambda path: find_bad_text(path.read_text())) == {}


def test_other_files_of_the_package_avoid_them():
    assert collect(TEXTS, lambda path: find_words(path.read_text())) == {}


def test_a_planted_word_is_found():
    module = (
        '"""What was said."""\n'
        "def mendAll(asked_rows, *, keeper=None):  # it runs beside the step\n"
        '    raise ValueError(f"{asked_rows} are settled", dict(told=1)["asked"])\n'
    )
    names = [line.partition(":")[0] for line in find_bad_names(module, "a/settle_rows.py")]
    assert set(names) == {"mendAll", "asked_rows", "keeper", "told", "settle_rows"}
    assert [line.split(": ")[:2] for line in find_bad_text(module)] == [
        ["line 1", "said"],
        ["line 3", "settled"],
        ["line 2", "beside"],
    ]
    assert find_words("Mended.") and not find_words("We recommend settings; besides, a keepsake.")


def test_the_log_is_checked_from_a_date_on():
    assert "## " in read_page(LOG) and len(read_page(LOG)) < LOG.stat().st_size
