"""What the documents cite is there: results by name, and superseded ones in the log alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from freescale_bench import figures

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
RESULT = re.compile(r"[a-z0-9_*]+(?:-[a-z0-9_*]+)+\.(?:json|txt)\b")


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
    assert not find_archived(text) and "archive/" not in text


def test_no_benchmark_reads_a_superseded_result():
    assert ARCHIVED, "superseded results are kept"
    files = [
        *(ROOT / "benchmarks" / "freescale_bench").rglob("*.*"),
        *(ROOT / "src" / "freescale" / "simulate").rglob("*.*"),
    ]
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore")
        assert not find_archived(text), path


def find_archived(text):
    """The superseded results that a text names, and not one whose name has theirs in it."""
    words = set(re.findall(r"[\w-]+", text))
    return [name for name in ARCHIVED if name.partition(".")[0] in words]


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
        "balance.svg",
        "architecture.svg",
        "tables.svg",
        "report-light.png",
        "report-dark.png",
    }
    made = set(figures.make_everything(RESULTS)[0]) | of_runs
    assert {path.name for path in FIGURES.iterdir()} == made


def test_every_picture_is_shown():
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert not [path.name for path in FIGURES.iterdir() if f"figures/{path.name})" not in shown]


GUIDES = [page for page in PAGES if page != LOG]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_targets_and_no_commits(page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"\b(?:was|were) asked\b|\bAsked\b|\basked of\b|\d asked\)", text)
    hashes = [word for word in re.findall(r"\b[0-9a-f]{7,40}\b", text) if not word.isdigit()]
    assert not [word for word in hashes if re.search(r"\d", word)]


def test_every_page_with_python_is_run():
    """By the tests below, test_host_tables.py, test_dynamic.py, test_torchrec_checkpoint.py,
    test_dlrm_v4.py, test_deltas.py, tests/e2e/test_examples.py, tests/e2e/test_recommend.py and
    tests/distributed/test_callbacks.py."""
    run = {"README.md", "your_model.md", "training.md", "embedding.md"}
    run |= {"host_tables.md", "dynamic.md", "from_torchrec.md", "data.md"}
    run |= {"features.md", "recommend.md", "serve.md", "dlrm_v4.md", "time_order.md", "deltas.md"}
    found = {page.name for page in PAGES if "```python" in page.read_text(encoding="utf-8")}
    assert found == run


def find_commands(text):
    """The lines of code blocks that call freescale, continued ones joined, without comments."""
    blocks = re.findall(r"```(?:bash|console|sh)?\n(.*?)```", text, re.DOTALL)
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    for line in "\n".join([*blocks, *indented]).replace("\\\n", " ").splitlines():
        words = line.partition(" #")[0].split()
        for start in ("freescale", "-m freescale"):
            first = start.split()
            places = [i for i in range(len(words)) if words[i : i + len(first)] == first]
            if places and (len(first) == 2 or places[0] == 0):
                yield words[places[0] + len(first) :]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_pages_show_exist(page):
    from freescale.cli.main import main

    for name, *words in filter(None, find_commands(page.read_text(encoding="utf-8"))):
        if name.startswith("-"):
            continue
        assert name in main.commands, f"freescale {name}"
        # the benchmarks read their options themselves
        if name == "bench" or words[:1] == ["calibrate"]:
            continue
        command = main.commands[name]
        known = {flag for entry in command.params for flag in (*entry.opts, *entry.secondary_opts)}
        nested = getattr(command, "commands", {})
        for entry in nested.values():
            known |= {flag for option in entry.params for flag in option.opts}
        shown = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert shown <= known | {"--help"}, f"freescale {name}: {sorted(shown - known)}"


def test_the_snippet_of_the_first_page_trains(capsys):
    import torch

    import freescale
    from freescale.batch import Jagged

    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    class MyModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.item, self.score = torch.nn.Embedding(50, 4), torch.nn.Linear(4, 1)

        def forward(self, batch):
            return {"size": self.score(self.item(batch.sequences["history"].values)).square().sum()}

    ids = torch.arange(6)
    batch = freescale.SequenceBatch(
        sequences={"history": Jagged(ids, torch.tensor([2, 4]))},
        weights={"size": torch.ones(2)},
    )
    names = {"freescale": freescale, "torch": torch, "MyModel": MyModel}
    exec(compile(snippet, "README.md", "exec"), {**names, "my_batches": [batch, batch]})
    steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in steps] == ["1", "2"]
    assert float(steps[1][1]) < float(steps[0][1])


def test_the_guide_to_order_of_time_appends(capsys, tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    page = ROOT / "docs" / "guide" / "time_order.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    day, lists = 86400, pa.list_(pa.int64())
    for name, first in (("until_sunday", 0), ("monday", 7 * day)):
        times = pa.array([[first + 60 * n for n in range(5)] for _ in range(9)], lists)
        items = pa.array([list(range(5))] * 9, lists)
        columns = {"user_id": pa.array(range(9)), "item_id": items, "timestamp": times}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, str(page), "exec"), {})
    assert capsys.readouterr().out.split() == ["90", "2", str(7 * day + 240)]


def test_the_guide_to_data_reads_histories(capsys, tmp_path, monkeypatch):
    page = ROOT / "docs" / "guide" / "data.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    rows = [f"{user},{item},{item}" for user in range(9) for item in range(5)]
    (tmp_path / "ratings.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, str(page), "exec"), {})
    assert capsys.readouterr().out.split() == ["0", "9", "1", "9"]
