"""The terms of the project: one source for docs/glossary.md (`freescale bench figures` writes it)
and for the tooltips of the report."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files


@dataclass(frozen=True)
class Term:
    """A term of the glossary."""

    section: str
    name: str
    text: str
    also: tuple[str, ...] = ()  # other names by which it is shown
    page: str = ""  # of the documentation, relative to docs/

    @property
    def slug(self) -> str:
        """Its name in addresses and in ids of HTML."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@cache
def read_glossary() -> tuple[Term, ...]:
    """Reads the terms in the order of static/glossary.toml."""
    source = files("freescale.report") / "static" / "glossary.toml"
    sections = tomllib.loads(source.read_text(encoding="utf-8"))["section"]
    return tuple(
        Term(section["title"], **entry | {"also": tuple(entry.get("also", ()))})
        for section in sections
        for entry in section["term"]
    )


@cache
def _index_names() -> dict[str, Term]:
    terms = read_glossary()
    names = {other.lower(): term for term in terms for other in term.also}
    return names | {term.name.lower(): term for term in terms}


def find_term(words: str) -> Term | None:
    """Finds the term of a figure, span or metric by its shown name, or None.

    Metrics contain numbers and names that the glossary leaves open: `hr@10` is HR@k, and a variant
    or task after a slash (`ne/click`) is ignored. So is the part of the split (`test hr@10`), and
    the lane of a span (`ahead/lookup`).
    """
    names, word = _index_names(), words.lower().strip()
    word = re.sub(r"^(test|validation) (?=.)", "", word)
    candidates = [word, re.sub(r"@\d+", "@k", word)]
    front, slash, back = word.partition("/")
    if slash:
        candidates += [back, re.sub(r"@\d+", "@k", front)]
    candidates += [word.split(",")[0]]
    return next((names[name] for name in candidates if name in names), None)


def explain(words: str, term: str | None = None) -> str:
    """HTML of words with a tooltip; plain words if the glossary has no such term. `term`: the
    term's name, if it differs from `words`."""
    found = find_term(term or words)
    shown = escape(words)
    if found is None:
        return shown
    return (
        f'<span class="term" tabindex="0" data-term="{found.slug}" '
        f'aria-describedby="term-{found.slug}">{shown}</span>'
    )


def render_definitions(slugs: Collection[str]) -> str:
    """The terms with these slugs and their meaning, as HTML, in the order of the alphabet."""
    terms = [term for term in read_glossary() if term.slug in slugs]
    rows = "".join(
        f'<dt>{escape(term.name)}</dt><dd id="term-{term.slug}">{escape(term.text)}</dd>'
        for term in sorted(terms, key=lambda term: term.name.lower())
    )
    return f'<details><summary>{len(terms)} terms</summary><dl class="terms">{rows}</dl></details>'
