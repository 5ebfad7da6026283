"""The glossary: one source for docs/glossary.md and for the report's tooltips, and no figure of the
report without an explanation."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from freescale_bench.figures import render_glossary
from helpers.report_cases import run_folder
from rich.console import Console

from freescale.ledger.record import KINDS
from freescale.ledger.trace import LANES
from freescale.report.console import print_ledger
from freescale.report.glossary import explain, find_term, read_glossary
from freescale.report.page import render_page
from freescale.report.runs import read_runs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"


def test_the_page_of_the_documentation_is_the_glossary():
    assert PAGE.read_text(encoding="utf-8") == render_glossary(), (
        "freescale bench figures writes it"
    )


def test_every_name_has_one_meaning():
    names = [name.lower() for term in read_glossary() for name in (term.name, *term.also)]
    assert sorted(set(names)) == sorted(names)
    assert all(term.text.endswith(".") for term in read_glossary())
    assert len({term.slug for term in read_glossary()}) == len(read_glossary())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("Straggler", "straggler time"),
        ("test hr@10", "HR@k"),
        ("hr@50/unseen", "unseen"),
        ("ne/click", "NE"),
        ("ahead/lookup", "lookup"),
        ("history events, before balancing", "history"),
        ("peak memory, rank 3", "peak memory"),
        ("test", "test"),
        ("something else", None),
    ],
)
def test_what_is_shown_leads_to_its_term(words, name):
    found = find_term(words)
    assert (found.name if found else None) == name
    assert explain(words).startswith("<span") is (name is not None)


def test_every_figure_of_a_page_is_explained(tmp_path):
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", balanced=False)]
    for chosen in (folders[:1], folders):
        text = render_page(read_runs(chosen))
        summary = text[text.index('id="summary"') : text.index('id="time"')]
        rows = re.findall(r'<dt>(.*?)</dt>|<th scope="row">(.*?)</th>', summary)
        assert len(rows) >= 10
        assert all("".join(row).startswith('<span class="term"') for row in rows)
        for part in ("legend", "panels"):
            shown = re.findall(rf'class="{part}">(.*?)</(?:ul|div)>', text, re.S)
            names = re.findall(r"</i>(.*?) <b>|<figcaption>(.*?)</figcaption>", "".join(shown))
            assert names and all('class="term"' in "".join(name) for name in names)
        used = re.findall(r'data-term="([^"]+)"', text)
        defined = re.findall(r'<dd id="term-([^"]+)"', text)
        assert set(used) <= set(defined) and len(defined) == len(set(defined))


def test_names_of_traffic_lanes_and_spans_are_terms():
    spans = ("forward", "backward", "optimizer", "lookup", "update rows", "deduplicate", "data")
    waits = ("straggler", "exposed", "arrive", "await batch", "await sums", "agree", "balance")
    assert all(find_term(name) for name in (*KINDS, *LANES, *spans, *waits, "compare", "other"))


def test_every_figure_of_the_terminal_is_a_term(tmp_path):
    console = Console(width=120, file=StringIO())
    print_ledger(console, read_runs([run_folder(tmp_path / "a")])[0].ledger)
    text = console.file.getvalue()
    names = [line.strip("│ ").split("│")[0].strip() for line in text.splitlines() if "│" in line]
    assert {"step time", "straggler time", "rows", "peak memory of a rank"} <= set(names)
    assert not [name for name in names if not find_term(name)]
