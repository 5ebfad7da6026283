"""Hooks of mkdocs. Pages link to files of the repository outside docs, so that they work where the
repository is browsed; the site has copies of these files, and its links lead there."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s#]+)(#[^)]*)?(\))")
_COPIES = "repository"  # a folder of the site


def _find_outside(page: str, link: str) -> str | None:
    """The path in the repository of what a page links to, if it is outside docs."""
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if target.startswith("docs/") else target


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to: files as they are, of folders a list."""
    root = Path(config.config_file_path).parent
    wanted: set[str] = set()
    for page in list(files.documentation_pages()):
        text = Path(page.abs_src_path or "").read_text(encoding="utf-8")
        for match in _LINK.finditer(text):
            outside = _find_outside(page.src_uri, match[2])
            if outside is not None:
                wanted.add(outside)
    for path in sorted(wanted):
        source = root / path
        if source.is_dir():
            content = "\n".join(sorted(entry.name for entry in source.iterdir())) + "\n"
        elif source.is_file():
            content = source.read_text(encoding="utf-8")
        else:
            raise FileNotFoundError(f"a page links to {path}, which does not exist")
        files.append(File.generated(config, f"{_COPIES}/{_name_copy(path)}", content=content))
    return files


def _name_copy(path: str) -> str:
    """JSON and text are shown by browsers; what they would download or render has .txt added."""
    return path if path.endswith((".json", ".txt")) else f"{path}.txt"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads links out of docs to the copies."""

    def lead(match: re.Match[str]) -> str:
        outside = _find_outside(page.file.src_uri, match[2])
        if outside is None:
            return match[0]
        here = posixpath.dirname(page.file.src_uri) or "."
        copy = posixpath.relpath(f"{_COPIES}/{_name_copy(outside)}", here)
        return f"{match[1]}{copy.replace(os.sep, '/')}{match[4]}"

    return _LINK.sub(lead, markdown)
