"""What the documents cite is there: results by name, and superseded ones in the log alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from freescale.bench import figures

ROOT = Path(__file__).resolve().parents[2]
RESULTS, LOG = ROOT / "benchmarks" / "results", ROOT / "docs" / "log.md"
FIGURES = ROOT / "docs" / "figures"
ARCHIVED = sorted(path.name for path in (RESULTS / "archive").iterdir())
PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Results have a testbed in their name, hence a hyphen; a run's own files (ledger.json, config.json)
# have none.
RESULT = re.compile(r"[a-z0-9*]+(?:-[a-z0-9*]+)+\.(?:json|txt)\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_result_that_a_page_names_exists(page):
    named = set(RESULT.findall(page.read_text(encoding="utf-8")))
    folders = [RESULTS, RESULTS / "archive"] if page == LOG else [RESULTS]
    assert not [name for name in named if not any(list(folder.glob(name)) for folder in folders)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != LOG], ids=lambda page: str(page.relative_to(ROOT))
)
def test_no_page_but_the_log_cites_a_superseded_result(page):
    text = page.read_text(encoding="utf-8")
    assert (
        not [name for name in ARCHIVED if name.partition(".")[0] in text] and "archive/" not in text
    )


def test_no_benchmark_reads_a_superseded_result():
    assert ARCHIVED, "superseded results are kept"
    files = [
        *(ROOT / "src" / "freescale" / "bench").rglob("*.*"),
        *(ROOT / "src" / "freescale" / "simulate").rglob("*.*"),
    ]
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore")
        assert not [name for name in ARCHIVED if name.partition(".")[0] in text], path


def test_every_result_that_a_calibration_names_exists():
    for path in (ROOT / "src" / "freescale" / "simulate" / "calibrations").glob("*.json"):
        assert not [
            name
            for name in RESULT.findall(path.read_text(encoding="utf-8"))
            if not (RESULTS / name).exists()
        ], path


def test_every_picture_is_made_from_a_result_or_of_a_run():
    of_runs = {
        "staged-trace.svg",
        "serial_step.svg",
        "balance.svg",
        "architecture.svg",
        "report-light.png",
        "report-dark.png",
    }
    made = set(figures.make_everything(RESULTS)[0]) | of_runs
    assert {path.name for path in FIGURES.iterdir()} == made


def test_every_picture_is_shown():
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [path.name for path in FIGURES.iterdir() if f"figures/{path.name})" not in shown]
