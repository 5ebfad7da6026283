"""The report of a real run in a real browser: it loads without a word on the console, its figures
are the ledger's, its timeline zooms, moves and says what an event is; light, dark, and as narrow as
a phone."""

from __future__ import annotations

import json

import pytest
from helpers.browser import Browser, browser
from helpers.command import freescale
from helpers.small_runs import interactions, train

from freescale.report.glossary import read_glossary

VIEW = (
    "const t = document.querySelector('.timeline'); return [Number(t.dataset.from), "
    "Number(t.dataset.to)];"
)
# The widest transfer of a lane that is in view: where its middle is in the window, and what it is.
EVENT = """
const lanes = arguments[0];
const events = [...document.querySelectorAll('.timeline rect.event')];
const rects = events.filter((r) => lanes.includes(r.event[1]) && r.event[6].path);
const width = (rect) => rect.getBoundingClientRect().width;
const widest = rects.reduce((a, b) => (width(a) > width(b) ? a : b));
widest.scrollIntoView({ block: 'center' });
const box = widest.getBoundingClientRect();
return [box.left + box.width / 2, box.top + box.height / 2, widest.event];
"""
SVG = (
    "const b = document.querySelector('.timeline svg').getBoundingClientRect(); return [b.left, "
    "b.top, b.width, b.height];"
)
FIGURES = """
const found = [...document.querySelectorAll('[data-figure]')];
return found.map(
  (one) => [one.dataset.run, one.dataset.figure, one.dataset.value, one.textContent]
);
"""
TIP = "const t = document.getElementById('tip'); return t.hidden ? null : t.textContent;"


def widest(window: Browser, lanes: list[str]) -> list:
    found = window.run(EVENT, lanes)
    window.settle()  # it may have scrolled, which ends a tooltip
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs and the page of both, and of the first alone. The second has a dynamic table."""
    folder = tmp_path_factory.mktemp("report")
    data = interactions(folder / "events.parquet")
    for name, schedule, balance in (("staged", "staged", "greedy"), ("serial", "serial", "none")):
        (folder / name).mkdir()
        more = (
            "--nproc",
            2,
            "--epochs",
            5,
            "--schedule",
            schedule,
            "--balance",
            balance,
            "--placement",
            "item=sharded",
        )
        if name == "serial":
            more += ("--rows", "item=dynamic:8192:seen=2")
        else:  # samples move, however little that gains
            more += ("--balance-adapt",)
        done = train(folder / name, data, *more)
        assert done.returncode == 0, done.stderr
        assert f"freescale report {folder / name / 'run'}" in done.stdout
    runs = [folder / "staged" / "run", folder / "serial" / "run"]
    for out, chosen in (("one.html", runs[:1]), ("two.html", runs)):
        done = freescale("report", *chosen, "--out", folder / out)
        assert done.returncode == 0 and out in done.stdout, done.stderr
    return folder


@pytest.fixture(scope="module")
def desk(made, tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


def test_figures_on_the_page_are_the_ledgers(made, desk: Browser):
    desk.open(made / "two.html")
    assert desk.log() == []
    ledgers = [
        json.loads((made / name / "run" / "ledger.json").read_text())
        for name in ("staged", "serial")
    ]
    shown = desk.run(FIGURES)
    assert len(shown) > 60
    for run, path, value, _ in shown:
        expected = ledgers[int(run)]
        for part in path.split("/"):
            expected = expected[int(part)] if isinstance(expected, list) else expected[part]
        assert json.loads(value) == expected, path
    words = {(int(run), path): text for run, path, _, text in shown}
    grown = desk.run(
        "return [...document.querySelectorAll('#curves figure')].map("
        "(f) => [f.querySelector('figcaption').textContent, f.querySelectorAll('.line').length])"
    )
    lines = dict(grown)
    for name in ("rows", "new ids", "rows that go", "turned away"):
        assert lines[f"Dynamic tables: {name}"] == 1, grown  # of the run that has one
    table = ledgers[1]
    assert words[1, "dynamic_fill_percent"] == f"{table['dynamic_fill_percent']:.1f} %"
    for name in ("rows", "inserted", "evicted", "swept", "turned_away", "waiting"):
        assert words[1, f"dynamic_{name}"] == f"{table[f'dynamic_{name}']:,.0f}"
        assert (0, f"dynamic_{name}") not in words
    for run, ledger in enumerate(ledgers):
        assert words[run, "samples_per_second"] == f"{ledger['samples_per_second']:,.0f}"
        assert words[run, "straggler_percent"] == f"{ledger['straggler_percent']:.1f} %"
        assert words[run, "exposed_percent"] == f"{ledger['exposed_percent']:.1f} %"
    # The bars are as wide as their figures say, and add up to the step.
    wide = desk.run(
        "return [...document.querySelectorAll('.bar')].slice(0, 2).map((b) => "
        "[...b.querySelectorAll('span')].map("
        "(s) => [JSON.parse(s.dataset.value), s.getBoundingClientRect().width]))"
    )
    for bar in wide:
        total, pixels = sum(v for v, _ in bar), sum(w for _, w in bar)
        assert all(abs(w - v / total * pixels) < 1 for v, w in bar)
        assert total == pytest.approx(ledgers[0]["step_ms"]["mean"], rel=0.15)
    staged = ledgers[0]
    assert staged["predicted_imbalance_before"] > staged["predicted_imbalance"] and staged[
        "machines"
    ][0]["ranks"] == [0, 1]
    sent = {kind: sum(paths.values()) for kind, paths in staged["paths"].items()}
    assert sent == pytest.approx(
        {kind: value for kind, value in staged["bytes_per_step"].items() if value}
    )


def test_timeline_zooms_and_moves(made, desk: Browser):
    desk.open(made / "one.html")
    desk.run("document.querySelector('.timeline svg').scrollIntoView({ block: 'center' })")
    whole = desk.run(VIEW)
    left, top, width, height = desk.run(SVG)
    desk.wheel(left + width / 2, top + height / 2, -120)
    near = desk.run(VIEW)
    assert whole[0] < near[0] < near[1] < whole[1]
    desk.drag([(left + width / 2, top + height / 2), (left + width / 2 - 60, top + height / 2)])
    later = desk.run(VIEW)
    assert later[0] > near[0] and later[1] - later[0] == pytest.approx(near[1] - near[0])
    desk.click("[data-action=reset]")
    assert desk.run(VIEW) == whole
    # on the ruler: zooms into a part
    desk.drag([(left + width / 2, top + 8), (left + width * 3 / 4, top + 8)])
    part = desk.run(VIEW)
    assert part[1] - part[0] < (whole[1] - whole[0]) / 2 and part[0] > whole[0]
    for action, holds in (
        ("zoom-in", lambda a, b: b[1] - b[0] < a[1] - a[0]),
        ("left", lambda a, b: b[0] < a[0]),
        ("right", lambda a, b: b[0] > a[0]),
        ("zoom-out", lambda a, b: b[1] - b[0] > a[1] - a[0]),
    ):
        before = desk.run(VIEW)
        desk.click(f"[data-action={action}]")
        assert holds(before, desk.run(VIEW)), action
    desk.run(
        "const s = document.querySelector('.timeline select'); s.value = 'all'; "
        "s.dispatchEvent(new Event('change'))"
    )
    every = desk.run(VIEW)
    assert every[1] - every[0] > 2 * (whole[1] - whole[0])
    # Zoomed out, the wheel scrolls the page.
    at = desk.run("return scrollY")
    desk.wheel(left + width / 2, top + height / 2, 200)
    assert desk.run(VIEW) == every and desk.run("return scrollY") >= at
    assert desk.log() == []


def test_tooltip(made, desk: Browser):
    desk.open(made / "one.html")
    x, y, (rank, lane, _, name, _, lasts, more) = widest(desk, ["ahead", "urgent"])
    desk.mouse(x, y)
    lines = desk.run(TIP).split("\n")
    assert lines[:2] == [name, f"rank {rank}, {lane}"] and f"path: {more['path']}" in lines
    assert f"lasts {lasts / 1e3:.3f} ms" in lines or f"lasts {lasts:.1f} µs" in lines
    assert f"sends {more['sent']:,} bytes, receives {more['received']:,} bytes" in lines
    desk.mouse(2, 2)
    assert desk.run(TIP) is None
    # By keys: the first event of rank 0, then the next, then another lane; escape ends it.
    seen = []
    for key in ("\ue014", "\ue014", "\ue015", "\ue00c"):
        desk.keys(".timeline svg", key)
        seen.append(desk.run(TIP))
    assert seen[0] and seen[1] and seen[0] != seen[1] and "rank 0, compute" in seen[1]
    assert "communication" in seen[2] and seen[3] is None
    bubbles = (
        "return [...document.querySelectorAll('.timeline rect.k-straggler, .timeline "
        "rect.k-exposed')].map((r) => r.event[1])"
    )
    assert set(desk.run(bubbles)) == {"compute"}
    assert desk.log() == []


def test_a_figure_is_explained_to_mouse_and_keys(made, desk: Browser):
    """In the glossary's words."""
    desk.open(made / "one.html")
    place = (
        "const box = document.querySelector('[data-term=straggler-time]').getBoundingClientRect();"
        "return [box.left + 5, box.top + 5];"
    )
    straggler = next(term.text for term in read_glossary() if term.name == "straggler time")
    desk.mouse(*desk.run(place))
    assert desk.run(TIP) == straggler
    desk.mouse(2, 2)
    assert desk.run(TIP) is None
    desk.run("document.querySelector('[data-term=straggler-time]').focus()")
    assert desk.run(TIP) == straggler
    # A term far down the page scrolls into view and keeps its explanation.
    desk.run("document.querySelector('#timeline .legend .term').focus()")
    desk.settle()
    named = desk.run("return document.activeElement.dataset.term")
    shown = desk.run(TIP)
    assert shown in [term.text for term in read_glossary() if term.slug == named]
    desk.keys("#timeline .legend .term", "\ue00c")
    assert desk.run(TIP) is None and desk.log() == []


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(made, tmp_path, dark):
    ground = "return getComputedStyle(document.body).backgroundColor"
    with browser(tmp_path / "profile", dark=dark) as window:
        window.open(made / "two.html")
        first = window.run(ground)
        window.click("#theme")
        second = window.run(ground)
        brightness = [
            sum(int(part) for part in colour[4:-1].split(",")) for colour in (first, second)
        ]
        assert brightness[dark] > 600 and brightness[1 - dark] < 150
        assert window.log() == []


def test_phone(made, tmp_path):
    """360 pixels: nothing makes the page scroll sideways; a tap says what an event is, two fingers
    zoom."""
    with browser(tmp_path / "profile", width=360, height=740) as window:
        for name in ("one.html", "two.html"):
            window.open(made / name)
            window.run(
                "document.querySelectorAll('details').forEach((part) => { part.open = true; })"
            )
            assert window.run("return document.documentElement.scrollWidth") <= 360
        window.open(made / "one.html")
        x, y, (rank, lane, _, name, *_) = widest(window, ["communication"])
        window.drag([(x, y)], kind="touch")
        assert window.run(TIP).startswith(f"{name}\nrank {rank}, {lane}\n")
        window.run("scrollTo(0, 0)")
        x, y = window.run(
            "const box = document.querySelector('#summary .term').getBoundingClientRect(); "
            "return [box.left + 5, box.top + 5]"
        )
        window.drag([(x, y)], kind="touch")
        assert window.run(TIP).startswith("Hit rate: the share of targets")  # quality comes first
        widest(window, ["communication"])
        whole = window.run(VIEW)
        left, top, width, height = window.run(SVG)
        middle, down = left + 74 + (width - 74) / 2, top + height / 2
        window.drag(
            [(middle - 20, down), (middle - 80, down)],
            [(middle + 20, down), (middle + 80, down)],
            kind="touch",
        )
        near = window.run(VIEW)
        assert near[1] - near[0] < 0.6 * (whole[1] - whole[0])
        assert window.log() == []


def test_errors(made, tmp_path):
    run = made / "staged" / "run"
    for arguments, words in (
        ((tmp_path,), "has no config.json"),
        ((tmp_path / "nowhere",), "no such folder"),
        ((run, "--out", tmp_path), "is a folder"),
        ((run, "--out", tmp_path / "no" / "page.html"), "there is no folder"),
    ):
        done = freescale("report", *arguments)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert freescale("report").returncode == 2
