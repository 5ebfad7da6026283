"""The report's page: its figures are the ledger's, names cannot break it, and it says what is
missing or damaged."""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from html import unescape
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from helpers.report_cases import run_folder
from rich.console import Console

from freescale.launch.attempts import Ending, describe_restart
from freescale.ledger.collector import Collector
from freescale.ledger.ledger import Ledger, sum_busy
from freescale.ledger.record import CollectiveRecord, Span
from freescale.report.charts import Series, choose_ticks, draw_lines, thin
from freescale.report.console import _list_figures, print_quality
from freescale.report.page import render_page
from freescale.report.runs import read_run, read_runs
from freescale.report.timeline import RANKS, STEPS, build_timeline, choose_ranks


class Page(HTMLParser):
    """Elements of a page, and whether all that were opened were closed."""

    VOID = ("meta", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def figures_of(text: str) -> list[tuple[int, str, object]]:
    found = [a for _, a in Page(text).found if "data-figure" in a]
    return [(int(a["data-run"]), a["data-figure"], json.loads(a["data-value"])) for a in found]


def looked_up(ledger: dict, path: str) -> object:
    value: object = ledger
    for part in path.split("/"):
        value = value[int(part)] if isinstance(value, list) else value[part]  # type: ignore[index]
    return value


def block(text: str, name: str) -> list:
    return json.loads(
        re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text, re.S)[1]
    )


def test_figures_are_the_ledgers(tmp_path):
    """Every number that carries a place in the ledger, on a page of two runs; and the shown words
    follow from it."""
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", balanced=False)]
    ledgers = [json.loads((folder / "ledger.json").read_text()) for folder in folders]
    text = render_page(read_runs(folders))
    shown = figures_of(text)
    for run, path, value in shown:
        assert looked_up(ledgers[run], path) == value, path
    for run in (0, 1):
        places = {path for place, path, _ in shown if place == run}
        assert places >= {
            "samples_per_second",
            "step_ms/mean",
            "straggler_percent",
            "exposed_percent",
            "bytes_per_step",
            "imbalance",
        }
        assert places >= {
            "busy_ms_per_rank/forward/1",
            "straggler_ms_per_rank/0",
            "exposed_ms_per_rank/1",
            "paths/rows/gloo",
        }
    assert [one["ledger"] for one in block(text, "ledgers")] == ledgers
    assert f">{ledgers[0]['straggler_percent']:.1f} %<" in text and ">20.0 %<" in text  # collisions
    assert "0.2500" in text and "4.0000" in text  # quality and last loss


def test_dynamic_tables_show_growth_admissions_evictions_and_fill(tmp_path):
    folders = [run_folder(tmp_path / "a", dynamic=True), run_folder(tmp_path / "b")]
    runs = read_runs(folders)
    text = render_page(runs)
    ledger = runs[0].ledger
    assert ledger["dynamic_rows"] == statistics.mean(16 * (step + 1) for step in range(2, 12))
    assert ledger["dynamic_fill_percent"] == pytest.approx(100 * ledger["dynamic_rows"] / 4096)
    shown = dict(re.findall(r'data-figure="(dynamic_[^"]+)"[^>]*>([^<]+)<', text))
    assert shown == {
        "dynamic_rows": "120",
        "dynamic_fill_percent": "2.9 %",
        "dynamic_inserted": "1",
        "dynamic_evicted": "21",
        "dynamic_swept": "41",
        "dynamic_turned_away": "61",
        "dynamic_waiting": "81",
    }
    titles = [f"Dynamic tables: {name}" for name in ("rows", "new ids", "rows that go")]
    for title in (*titles, "Dynamic tables: turned away"):
        assert text.count(f"{title}</figcaption>") == 1
    lines = dict(_list_figures(ledger))
    assert lines["dynamic rows"] == "120 (2.9 % full); 1 new a step, 21 evicted, 61 turned away"
    plain = render_page(runs[1:])
    assert 'data-figure="dynamic_' not in plain and "Dynamic tables" not in plain


def test_restarts_have_a_section_where_there_are_any(tmp_path):
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b")]
    assert 'id="restarts"' not in render_page(read_runs(folders))
    ending = Ending("ValueError", "<disk> full", 137, 1767268800.0, 1)
    with open(folders[1] / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(describe_restart(ending, 100, ending.time + 14.2)) + "\n")
    text = render_page(read_runs(folders))
    assert 'href="#restarts"' in text and "&lt;disk&gt; full" in text
    row = text[text.index('<section id="restarts">') :].split("</section>")[0]
    for shown in ("2026-01-01 12:00:00", ">137<", "ValueError: rank 1", "14.2 s", ">100<", ">37<"):
        assert shown in row, shown


def test_quality_stands_beside_itself_without_the_history(tmp_path):
    """All metrics of the test part in a table, the headlines as curves and tiles."""
    text = render_page([read_run(run_folder(tmp_path / "a"))])
    text = re.sub('<span class="term"[^>]*>(.*?)</span>', r"\1", text)
    head = "".join(
        f'<th scope="col">{cell}</th>'
        for who in ("model", "popularity")
        for cell in (f"{who}, all items", f"{who}, unseen items")
    )
    assert head in text
    cells = "".join(f"<td>{cell}</td>" for cell in ("0.2500", "0.3750", "0.1250", "0.1875"))
    assert f'<th scope="row">hr@10</th>{cells}' in text and "6.2 % of the targets" in text
    assert '<th scope="row">hr@50</th><td>-</td><td>0.6875</td>' in text
    assert "Validation hr@10/unseen" in text and "Validation hr@50" not in text
    assert "Best on the validation part: step 7, hr@10/unseen 0.4375; its checkpoint" in text
    assert "Evaluated with the checkpoint of step 7." in text and ">step 7<" in text
    older = render_page([read_run(run_folder(tmp_path / "b", older=True))])
    assert "unseen" not in older and "Best on" not in older and ">0.1250<" in older


def test_a_bar_adds_up_to_the_step(tmp_path):
    ledger = read_run(run_folder(tmp_path / "a")).ledger
    for rank in (0, 1):
        own = sum(values[rank] for values in ledger["busy_ms_per_rank"].values())
        assert own + ledger["straggler_ms_per_rank"][rank] + ledger["exposed_ms_per_rank"][
            rank
        ] == pytest.approx(55)
    assert ledger["straggler_ms_per_rank"] == [10, 0] and ledger["exposed_ms_per_rank"] == [5, 5]
    assert ledger["busy_ms_per_rank"]["other"] == [7, 7]  # 0 to 2 and 50 to 55
    assert ledger["predicted_imbalance_before"] == pytest.approx(15 / 12.5)


def test_busy_counts_the_innermost_span_and_no_wait():
    spans = [
        Span("inner", 20, 30),
        Span("outer", 10, 50),
        Span("same", 60, 70),
        Span("longer", 60, 80),
        Span("ahead/lookup", 0, 90),
        Span("empty", 5, 5),
    ]
    assert sum_busy(0, 100, spans, [CollectiveRecord("rows", 1, 1, 0, 25, 40)]) == {
        "other": 40,
        "outer": 20,
        "inner": 5,
        "longer": 10,
        "same": 10,
    }
    # a span of the next step
    assert sum_busy(0, 10, [Span("late", 5, 20)], []) == {"other": 5, "late": 5}


def test_names_cannot_break_the_page(tmp_path):
    text = render_page([read_run(run_folder(tmp_path / "a"), '<img src=x onerror=alert(1)>"')])
    parsed = Page(text)
    assert parsed.open == [] and not [tag for tag, _ in parsed.found if tag == "img"]
    assert [a.get("type") for tag, a in parsed.found if tag == "script"] == [
        "application/json",
        "application/json",
        None,
    ]
    assert (
        "<script>alert" not in text and "&lt;script&gt;alert" in text and "Cray-1 &lt;b&gt;" in text
    )
    assert all(
        a.get("src") is None and not str(a.get("href", "#")).startswith("http")
        for _, a in parsed.found
    )


def test_the_page_loads_nothing():
    for path in (Path(__file__).parents[2] / "src/freescale/report/static").iterdir():
        assert not re.search(
            r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", path.read_text()
        ), path


def test_older_runs_say_what_is_missing(tmp_path):
    text = render_page(read_runs([run_folder(tmp_path / "a", older=True)]))
    assert Page(text).open == []
    missing = unescape(text[text.index('id="missing"') : text.index("</aside>")])
    for words in (
        "did when it did not wait",
        "machine",
        "before and after balancing",
        "what carried each transfer",
    ):
        assert words in missing
    assert "compute_ms_per_rank/0" in text and "Not recorded" in text
    complete = run_folder(tmp_path / "b")
    assert read_run(complete).missing == [] and 'id="missing"' not in render_page(
        read_runs([complete])
    )


def test_a_run_that_did_not_end(tmp_path):
    """Its figures are made from the lines it left, the last of which may be half written."""
    folder = run_folder(tmp_path / "a")
    ledger = json.loads((folder / "ledger.json").read_text())
    for name in ("ledger.json", "trace.json.gz"):
        (folder / name).unlink()
    with open(folder / "ledger.jsonl", "a") as file:
        file.write('{"step": 12, "st')
    run = read_run(folder)
    assert (
        run.ledger["step_ms"] == ledger["step_ms"]
        and run.ledger["busy_ms_per_rank"] == ledger["busy_ms_per_rank"]
    )
    text = render_page([run])
    assert (
        "the run did not end" in text and "there is no timeline" in text and "is not whole" in text
    )
    assert block(text, "timelines") == [None]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        pytest.param("config.json", "{", "config.json is damaged", id="config cut short"),
        pytest.param("ledger.json", "[]", "ledger.json is damaged", id="ledger is a list"),
        pytest.param(
            "ledger.json",
            '{"measured_steps": 4}',
            ("ledger.json is damaged: it has no ranks, step_ms"),
            id="ledger lacks keys",
        ),
        pytest.param(
            "ledger.jsonl",
            "{}\nnope\n{}\n",
            "ledger.jsonl, line 2 is damaged",
            id="record is no JSON",
        ),
        pytest.param(
            "metrics.jsonl", "3\n{}\n", "metrics.jsonl, line 1 is damaged", id="metric is no object"
        ),
        pytest.param(
            "trace.json.gz", "not gzip", "trace.json.gz is damaged", id="trace is not gzip"
        ),
        pytest.param(
            "trace.json.gz",
            gzip.compress(b'{"traceEvents": [{"ph": "X"}]}', mtime=0),
            "is not an event",
            id="trace event lacks keys",
        ),
        pytest.param(
            "trace.json.gz",
            gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9],
            ("trace.json.gz is damaged"),
            id="trace cut short",
        ),
    ],
)
def test_damage_is_named(tmp_path, name, content, words):
    folder = run_folder(tmp_path / "a")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(words)):
        read_run(folder)


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no config.json and no ledger.json and no ledger"):
        read_run(tmp_path)


def test_the_run_of_a_loop_of_ones_own_has_a_page(tmp_path):
    """A ledger and nothing else: the page says what is unknown, alone and beside another run."""
    ledger = Ledger()
    collector = Collector(ledger, 0, 1, lambda payload: [payload], tmp_path)
    for number in range(4):
        ledger.begin_step(number)
        with ledger.span("forward"):
            pass
        ledger.end_step()
    collector.close()
    for folders in ([tmp_path], [run_folder(tmp_path / "b"), tmp_path]):
        text = render_page(read_runs(folders))
        assert Page(text).open == []
        missing = unescape(text[text.index('id="missing"') : text.index("</aside>")])
        assert "config.json: the settings are unknown" in missing and "metrics.jsonl" in missing
        assert ("Unknown: there is no config.json" in text) is (len(folders) == 1)
        assert ("<td>unknown</td>" in text) is (len(folders) == 2)
        shown = figures_of(text)
        assert (len(folders) - 1, "measured_steps", 2) in shown


@pytest.mark.parametrize(
    ("left", "words"),
    [
        pytest.param(
            ["config.json"],
            "the run ended before its first figures, or is still on the way to them",
            id="config alone",
        ),
        pytest.param(
            ["config.json", "metrics.jsonl"],
            "the run ended before its first figures",
            id="no ledger",
        ),
        pytest.param(
            ["config.json", "metrics.jsonl", "ledger.jsonl"],
            ("the run made 2 steps, and the first two are warm-up"),
            id="warm-up steps alone",
        ),
    ],
)
def test_a_run_that_was_killed_early_has_a_page(tmp_path, left, words):
    """Whatever it left, alone and beside one that ended."""
    folder = run_folder(tmp_path / "a")
    lines = (folder / "ledger.jsonl").read_text().splitlines(True)
    (folder / "ledger.jsonl").write_text("".join(lines[:2]))
    for path in folder.iterdir():
        if path.name not in left:
            path.unlink()
    for folders in ([folder], [folder, run_folder(tmp_path / "b")], [tmp_path / "b", folder]):
        text = render_page(read_runs(folders))
        assert Page(text).open == []
        missing = unescape(text[text.index('id="missing"') : text.index("</aside>")])
        assert words in missing and "Nothing was measured" in text
        assert ("4.0000" in text) is ("metrics.jsonl" in left or len(folders) > 1)  # the last loss


def test_lines_that_go_further_than_the_ledger_count(tmp_path):
    """A run that was stopped, went on and was killed: its ledger.json is the first part's."""
    folder = run_folder(tmp_path / "a")
    ledger = json.loads((folder / "ledger.json").read_text())
    (folder / "ledger.json").write_text(
        json.dumps({**ledger, "steps": 5, "measured_steps": 3, "step_ms": {"mean": 1, "median": 1}})
    )
    run = read_run(folder)
    assert run.ledger == ledger and "the run did not end" in run.missing[0]


@pytest.mark.parametrize("older", [False, True])
def test_a_run_resumed_on_another_number_of_ranks_says_so(tmp_path, older):
    """Its figures are those of the steps on the present number; versions that mixed them are
    corrected."""
    before, now = run_folder(tmp_path / "a", steps=5), run_folder(tmp_path / "b", ranks=1)
    lines = [(folder / "ledger.jsonl").read_text() for folder in (before, now)]
    (now / "ledger.jsonl").write_text("".join(lines))
    ledger = json.loads((now / "ledger.json").read_text())
    counted = {**ledger, "steps": 17}
    if older:
        del counted["steps_on_other_ranks"]
        counted["straggler_percent"] = 33.0
    else:
        counted["steps_on_other_ranks"] = {"2": 5}
    (now / "ledger.json").write_text(json.dumps(counted))
    run = read_run(now)
    assert run.ledger == {**ledger, "steps": 17, "steps_on_other_ranks": {"2": 5}}
    assert len(run.measured_lines) == run.ledger["measured_steps"] == 10
    text = render_page([run])
    assert (
        "The run also made 5 steps on 2 ranks. Figures and timeline are of its steps on 1" in text
    )
    assert "2 (ranks 0, 1)" in render_page([read_run(before)])  # its machine


def test_labels_of_an_axis_stand_beside_its_ticks():
    """However long the ticks are: the label ends where the longest of them begins, or before."""
    for high in (1, 0.0123456, 123456.7):
        chart = draw_lines([Series("a", "r-0", [(1, 0.0), (2, high)])], "loss")
        ticks = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]+)</text>', chart)
        label = float(re.search(r'class="label" x="([\d.]+)" [^>]*rotate', chart)[1])
        assert len(ticks) > 1
        assert all(float(x) - 7 * len(words) > label + 4 for x, words in ticks)


def test_names_tell_runs_apart(tmp_path):
    folders = [run_folder(tmp_path / "x" / "run"), run_folder(tmp_path / "y" / "run")]
    assert [run.name for run in read_runs(folders)] == ["x/run", "y/run"]
    assert [run.name for run in read_runs(folders[:1])] == ["run"]
    assert [run.name for run in read_runs(folders[:1] * 2)] == ["run", "run"]


def test_timeline(tmp_path):
    """Steps, lanes and bubbles of known records."""
    drawn = build_timeline(read_run(run_folder(tmp_path / "a")).events)
    assert drawn["ranks"] == [0, 1] and drawn["traced"] == 12 and len(drawn["steps"]) == STEPS
    assert 0 <= drawn["pick"] < STEPS - 1 and drawn["steps"][0][0] >= 2  # the first two are warm-up
    assert [name for name, _ in drawn["lanes"]] == ["compute", "communication", "ahead"]
    start = drawn["steps"][0][1]
    first = [e for e in drawn["events"] if start <= e[4] < start + 55_000]
    bubbles = [(e[0], e[3], e[4] - start, e[5], e[6]["for"]) for e in first if "for" in e[6]]
    assert sorted(bubbles) == [
        (0, "exposed", 40_000, 5_000, "dense"),
        (0, "straggler", 30_000, 10_000, "dense"),
        (1, "exposed", 40_000, 5_000, "dense"),
    ]
    (rows,) = [e for e in first if e[0] == 1 and e[3] == "rows"]
    assert rows[1] == "ahead" and rows[4:6] == [10_000, 10_000]
    assert rows[6] == {"sent": 1000, "received": 2000, "wait": 0.0, "path": "gloo"}


def test_the_page_stays_small(tmp_path):
    """Many ranks and steps: some are chosen, the slowest rank always."""
    few = render_page(read_runs([run_folder(tmp_path / "few", steps=40, ranks=16)]))
    many = render_page(read_runs([run_folder(tmp_path / "many", steps=80, ranks=64)]))
    assert len(many) < 1.5 * len(few) < 1.5 * 600_000
    assert len(block(many, "timelines")[0]["ranks"]) == RANKS and f"{RANKS}" in many
    picked = choose_ranks(range(100), 8, 37)
    assert len(picked) == 8 and 37 in picked and 0 in picked


def test_short_runs(tmp_path):
    """One measured step, one rank: less to show, nothing breaks."""
    for steps, ranks in ((3, 1), (4, 2)):
        text = render_page(read_runs([run_folder(tmp_path / f"{steps}", steps=steps, ranks=ranks)]))
        assert Page(text).open == []
    assert build_timeline([]) is None


def test_axes():
    assert (
        choose_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
        and choose_ticks(3, 3)[0] <= 3 <= choose_ticks(3, 3)[-1]
        and choose_ticks(0, 0) != []
    )
    assert thin(range(1000), 4) == [249, 499, 749, 999] and thin([1, 2], 4) == [1, 2]
    assert "loss" in draw_lines([Series("a", "r-0", [(1, 2.0)])], "loss")


def test_the_terminal_says_why_a_gauc_is_not_a_number():
    lines = StringIO()
    quality = {"model": {"ne/like": 1.0, "auc/like": 0.5, "gauc/like": math.nan}}
    print_quality(Console(file=lines, width=100), quality)
    assert "gauc/like: not defined, since no user has" in lines.getvalue()
    lines = StringIO()
    print_quality(Console(file=lines, width=100), {"model": {"auc/like": 0.5, "gauc/like": 0.6}})
    assert "both classes" not in lines.getvalue()
