"""`freescale bench figures`: every figure is drawn from the committed results, and the documents
show what the results say."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as tree
from dataclasses import asdict
from pathlib import Path

import pytest
from freescale_bench import figures
from freescale_bench.balance.table import format_cost
from freescale_bench.ladder import rungs
from freescale_bench.ladder.figure import draw_ladder
from freescale_bench.ladder.table import format_ladder

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("figure", figures.PICTURES, ids=lambda figure: figure.name)
def test_a_figure_is_drawn_and_names_its_sources(figure):
    if absent := figures.find_missing(figure.files, RESULTS):
        # measured on a GPU: it may not be there yet
        assert figure.name == "overlap", f"{absent} are committed results"
        return
    for name, (picture, used) in figures.draw(figure, RESULTS).items():
        root = tree.fromstring(picture)
        words = "\n".join("".join(element.itertext()) for element in root.iter(f"{SVG}text"))
        for raw, result in used.items():
            assert f"{raw}.json: " in words and f", {result['date'][:10]}" in words, name
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for element in root.iter(f"{SVG}rect"):
            if "x" in element.attrib:
                assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width, name
        assert all(
            0 <= float(element.attrib["y"]) <= height for element in root.iter(f"{SVG}text")
        ), name
        assert "nan" not in picture


def test_predicted_and_measured_look_different():
    exposed = next(figure for figure in figures.PICTURES if figure.name == "exposed")
    picture = figures.draw(exposed, RESULTS)["exposed"][0]
    lines = re.findall(r"<polyline[^>]*>", picture)
    dashed = [line for line in lines if "stroke-dasharray" in line]
    assert (
        len(lines) == 14 and len(dashed) == 2 and "Dashed lines, hollow dots: predicted" in picture
    )


def test_the_overlap_figure_appears_with_its_results(tmp_path):
    overlap = next(figure for figure in figures.PICTURES if figure.name == "overlap")
    _, parts, left_out = figures.make_everything(tmp_path)
    assert any(
        line.startswith("overlap: left out, no overlap-4ranks-h200.json") for line in left_out
    )
    assert "Not measured yet" in parts["figure-overlap"]("../")
    slower = {
        "hostwire": 0.4,
        "nccl": 14.2,
        "nccl, at most 1 channel": -0.3,
        "nccl, at most 2 channels": 5.0,
    }
    rows = [
        {"group": "products", "case": "40 products", "arm": arm, "slower_percent": value}
        for arm, value in slower.items()
    ]
    rows += [
        {
            "group": "best setting of nccl",
            "case": "40 products",
            "arm": "nccl",
            "slower_percent": 99.0,
        }
    ]
    rows += [{"group": "alone", "case": "AllToAll", "arm": "nccl"}]
    result = {
        "rows": rows,
        "machine": {"gpu": "NVIDIA H200"},
        "commit": "abc",
        "date": "2026-01-02T03",
        "command": "x",
        "claims": [],
    }
    (tmp_path / "overlap-4ranks-h200.json").write_text(json.dumps(result))
    picture = figures.draw(overlap, tmp_path)["overlap"][0]
    assert all(
        words in picture for words in ("+0.4 %", "+14.2 %", "-0.3 %", ("NVIDIA H200, 2026-01-02"))
    )
    tree.fromstring(picture)
    assert "+5.0 %" not in picture  # neither NCCL's default nor its best
    assert "+99.0 %" not in picture
    assert "(figures/overlap.svg)" in figures.make_everything(tmp_path)[1]["figure-overlap"]("../")


def test_a_rung_that_loses_is_said_to():
    result = json.loads((RESULTS / "ladder-paper-hosts.json").read_text())
    result["rows"][2]["samples_per_second"]["median"] = 1.0
    table = format_ladder({"ladder-paper-hosts": result}, "x")
    assert (
        "| serial | 1 | 0.01 x, slower than TorchRec |" in table
        and table.count("slower than TorchRec") == 1
    )
    assert all(
        f"{entry['measured']:.3g}" in table for entry in result["claims"] if not entry["holds"]
    )


def test_the_ladder_says_what_its_hosts_and_rungs_are():
    table = format_ladder(
        {"ladder-paper-hosts": json.loads((RESULTS / "ladder-paper-hosts.json").read_text())}, "x"
    )
    assert "network namespaces of one machine of 2 cores" in table and "between hosts" not in table
    assert "--balance-adapt" in table and "--transport hostwire-tcp" in table
    assert "freescale train takes by default on these ranks" in table


@pytest.mark.parametrize("name", ["ladder-paper-hosts", "ladder-paper-4ranks-h200"])
def test_the_defaults_are_a_rung_where_they_were_measured(name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    result["rows"] = [row for row in result["rows"] if row["arm"] != rungs.DEFAULTS]
    assert "were not measured in this run" in format_ladder({name: result}, "x")
    options = asdict(rungs.OURS[rungs.DEFAULTS]) | {"transport": "pigeons"}
    result["rows"].append({**result["rows"][-1], "arm": rungs.DEFAULTS, "options": options})
    table = format_ladder({name: result}, "x")
    assert (
        "| defaults | " in table
        and ("by default on these ranks, `--schedule staged --balance greedy --transport pigeons")
        in table
    )
    assert "not measured" not in table and "pigeons" in draw_ladder({name: result})


def test_targets_are_said_to_be_met_or_missed():
    used = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in figures.MEASURED}
    for result in used.values():
        for entry in result["claims"]:
            entry["holds"] = True
    assert "All targets are met." in format_cost(used, "x")
    entry = used["balance-measured-8ranks-h200"]["claims"][0]
    entry["holds"] = False
    table = format_cost(used, "x")
    assert (
        f"Targets missed: balance-measured-8ranks-h200: {entry['claim']}." in table
        and "All targets are met." not in table
    )


def test_what_superseded_runs_missed_is_not_counted(tmp_path):
    result = {"claims": [{"claim": "fast", "asked": 1, "measured": 2, "unit": "s", "holds": False}]}
    (tmp_path / "archive").mkdir()
    for path in (tmp_path / "new-cpu.json", tmp_path / "archive" / "old-cpu.json"):
        path.write_text(json.dumps(result))
    table = figures.make_everything(tmp_path)[1]["failed"]("../")
    assert "new-cpu" in table and "old-cpu" not in table and "1 of 1 targets" in table


def test_marked_parts_are_filled_and_others_left_alone():
    ends = "<!-- /measured -->"
    document = (
        f"a\n<!-- measured:x -->\n{ends}\nb\n<!-- measured:gone -->\nkept\n{ends}\nc\n<!-- "
        f"measured:y -->\nold\n{ends}\n"
    )
    parts = {"x": lambda depth: f"new {depth}", "y": lambda depth: "newer"}
    made = figures.fill(document, parts, "../")
    assert made == document.replace(f"x -->\n{ends}", f"x -->\nnew ../\n{ends}").replace(
        "old", "newer"
    )
    assert figures.fill(made, parts, "../") == made


def test_documents_and_pictures_are_those_of_the_results(capsys):
    """After a new result: freescale bench figures"""
    assert figures.main(["--check"]) == 0, capsys.readouterr().out


def test_marked_parts_have_names_that_exist():
    _, parts, _ = figures.make_everything(RESULTS)
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"<!-- measured:([\w-]+) -->", text)
        assert text.count("<!-- /measured -->") == len(names)
        assert set(names) <= set(parts) | set(figures.TABLES), path


def test_what_the_documents_link_to_exists():
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
            assert "://" in link or (path.parent / link).exists(), f"{path.name} links to {link}"
