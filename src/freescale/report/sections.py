"""The parts of the report that are words, tables and bars. Every number of the ledger carries its
place in it (`data-figure`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from freescale.report.runs import Run
from freescale.report.timeline import chosen

BARS = 32  # ranks with a bar, at most
# Names that have a colour of their own in static/style.css; all others share one.
COLOURED = frozenset(
    (
        "forward",
        "backward",
        "optimizer",
        "lookup",
        "update-rows",
        "deduplicate",
        "compare",
        "data",
        "agree",
        "balance",
        "arrive",
    )
    + (
        "other",
        "straggler",
        "exposed",
        "lanes",
        "counts",
        "ids",
        "rows",
        "gradients",
        "samples",
        "dense",
    )
)
# In the order of a bar: what is the model's, what the rest costs, what is lost.
_ORDER = (
    "forward",
    "backward",
    "optimizer",
    "lookup",
    "update rows",
    "deduplicate",
    "data",
    "agree",
    "balance",
    "arrive",
)
_WAITS = {
    "straggler": "waiting for the slowest rank",
    "exposed": "exposed communication",
    "lanes": "waiting for the rank's own lanes",
}


def colour(name: str) -> str:
    slug = name.replace(" ", "-")
    return f"k-{slug if slug in COLOURED else 'other'}"


def size(value: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} B"


def figure(run: int, path: str, ledger: Mapping, show: Callable[[Any], str]) -> str:
    """A number of the ledger with its place there, e.g. `exposed_ms/rows`; a dash where the ledger
    has none."""
    value: Any = ledger
    for part in path.split("/"):
        value = value[int(part)] if isinstance(value, list) else value.get(part)
        if value is None:
            return '<span class="none">-</span>'
    return f"<span {_place(run, path, value)}>{escape(show(value))}</span>"


def _place(run: int, path: str, value: Any) -> str:
    words = escape(json.dumps(value), quote=True)
    return f'data-run="{run}" data-figure="{escape(path, quote=True)}" data-value="{words}"'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str = "") -> str:
    """Cells are HTML. The first column is words, the others numbers."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        "<tr>"
        + f'<th scope="row">{row[0]}</th>'
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        '<div class="scroll"><table '
        f'class="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def cards(runs: Sequence[Run], made: Callable[[int, Run], str], measured: bool = True) -> str:
    """Runs beside each other, where there is room. `measured`: what is made takes the figures of a
    ledger, which a run may lack."""
    several = len(runs) > 1
    parts = []
    for place, run in enumerate(runs):
        title = f'<h3><i class="run r-{place % 8}"></i>{escape(run.name)}</h3>' if several else ""
        words = made(place, run) if run.measured or not measured else "<p>Nothing was measured.</p>"
        parts.append(f'<div class="card">{title}{words}</div>')
    return f'<div class="cards">{"".join(parts)}</div>'


# ---- the summary


def quality(run: Run) -> dict[str, float]:
    """Of the test part at the end, or of the last validation."""
    for part in ("test", "validation"):
        found = next(
            (entry[part]["model"] for entry in reversed(run.metrics) if part in entry), None
        )
        if found:
            return {f"{part} {name}": value for name, value in found.items() if value is not None}
    return {}


def summary(runs: Sequence[Run]) -> str:
    shown: list[tuple[str, Callable[[int, Run], str]]] = [
        (
            "samples/s",
            lambda p, r: (
                figure(p, "samples_per_second", r.ledger, lambda v: f"{v:,.0f}") + _against(runs, r)
            ),
        ),
        ("step, mean", lambda p, r: figure(p, "step_ms/mean", r.ledger, lambda v: f"{v:,.1f} ms")),
        (
            "step, median",
            lambda p, r: figure(p, "step_ms/median", r.ledger, lambda v: f"{v:,.1f} ms"),
        ),
        (
            "straggler",
            lambda p, r: figure(p, "straggler_percent", r.ledger, lambda v: f"{v:.1f} %"),
        ),
        (
            "exposed communication",
            lambda p, r: figure(p, "exposed_percent", r.ledger, lambda v: f"{v:.1f} %"),
        ),
        (
            "imbalance of compute",
            lambda p, r: figure(p, "imbalance", r.ledger, lambda v: f"{v:.3f}"),
        ),
        (
            "sent a step, all ranks",
            lambda p, r: figure(p, "bytes_per_step", r.ledger, lambda v: size(sum(v.values()))),
        ),
        (
            "collisions",
            lambda p, r: figure(p, "collision_percent", r.ledger, lambda v: f"{v:.1f} %"),
        ),
        ("last loss", lambda p, r: _last_loss(r)),
    ]
    names = dict.fromkeys(name for run in runs for name in quality(run))
    keep = [n for n in names if n.endswith(("hr@10", "ndcg@10", "auc", "ne"))] or list(names)[:2]
    shown += [(escape(name), partial(_quality, name)) for name in keep]
    shown.append(("ranks", lambda p, r: figure(p, "ranks", r.ledger, str)))
    shown.append(
        ("measured steps", lambda p, r: figure(p, "measured_steps", r.ledger, lambda v: f"{v:,}"))
    )
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{name}</dt><dd>{show(0, runs[0])}</dd></div>" for name, show in shown
        )
        return f'<dl class="tiles">{tiles}</dl>'
    head = ["", *(f'<i class="run r-{p % 8}"></i>{escape(run.name)}' for p, run in enumerate(runs))]
    return table(
        head,
        [[name, *(show(p, run) for p, run in enumerate(runs))] for name, show in shown],
        "summary",
    )


def _quality(name: str, place: int, run: Run) -> str:
    return f"{quality(run)[name]:.4f}" if name in quality(run) else _none()


def _against(runs: Sequence[Run], run: Run) -> str:
    """How much faster than the first run."""
    first, own = (one.ledger.get("samples_per_second") for one in (runs[0], run))
    return (
        ""
        if run is runs[0] or not first or own is None
        else (f" <small>({own / first:.2f} x)</small>")
    )


def _last_loss(run: Run) -> str:
    loss = next(
        (entry["loss"] for entry in reversed(run.metrics) if entry.get("loss") is not None), None
    )
    return _none() if loss is None else f"{loss:.4f}"


def _none() -> str:
    return '<span class="none">-</span>'


# ---- where a step's time goes


def breakdown(ledger: Mapping) -> dict[str, tuple[str, list[float]]]:
    """Of each part of a bar: its place in the ledger, and the milliseconds of every rank."""
    parts: dict[str, tuple[str, list[float]]] = {}
    busy = ledger.get("busy_ms_per_rank") or {}
    for name in sorted(
        busy,
        key=lambda name: (name == "other", _ORDER.index(name) if name in _ORDER else len(_ORDER)),
    ):
        parts[name] = (f"busy_ms_per_rank/{name}", busy[name])
    if not busy:
        parts["forward and backward"] = ("compute_ms_per_rank", ledger["compute_ms_per_rank"])
    parts["straggler"] = ("straggler_ms_per_rank", ledger["straggler_ms_per_rank"])
    if ledger.get("exposed_ms_per_rank"):
        parts["exposed"] = ("exposed_ms_per_rank", ledger["exposed_ms_per_rank"])
    if any(ledger.get("lane_ms_per_rank") or ()):
        parts["lanes"] = ("lane_ms_per_rank", ledger["lane_ms_per_rank"])
    return parts


def step_time(runs: Sequence[Run]) -> str:
    bars = [
        (breakdown(run.ledger), rank)
        for run in runs
        if run.measured
        for rank in range(run.ledger["ranks"])
    ]
    longest = max(
        (sum(values[rank] for _, values in parts.values()) for parts, rank in bars), default=0.0
    )
    return cards(runs, lambda place, run: _bars(place, run, longest))


def _bars(place: int, run: Run, longest: float) -> str:
    from freescale.report.charts import short, ticks

    parts = breakdown(run.ledger)
    compute = run.ledger["compute_ms_per_rank"]
    ranks = chosen(range(run.ledger["ranks"]), BARS, compute.index(max(compute)))
    marks = ticks(0, longest)
    scale = 100 / marks[-1]
    rows = []
    for rank in ranks:
        pieces = []
        for name, (path, values) in parts.items():
            words = f"{_WAITS.get(name, name)}: {values[rank]:.2f} ms"
            shown = "forward" if name == "forward and backward" else name
            pieces.append(
                f'<span class="{colour(shown)}" style="width:{values[rank] * scale:.3f}%" '
                f'title="{escape(words, quote=True)}"'
                f" {_place(place, f'{path}/{rank}', values[rank])}></span>"
            )
        rows.append(f'<div class="bar"><b>rank {rank}</b><div>{"".join(pieces)}</div></div>')
    axis = "".join(f'<span style="left:{mark * scale:.2f}%">{short(mark)}</span>' for mark in marks)
    left_out = (
        f"<p>{len(ranks)} of {run.ledger['ranks']} ranks, the slowest among them.</p>"
        if len(ranks) < len(compute)
        else ""
    )
    mean = lambda values: f"{sum(values) / len(values):,.2f} ms"  # noqa: E731
    legend = "".join(
        f'<li><i class="{colour("forward" if name == "forward and backward" else name)}"></i>{escape(_WAITS.get(name, name))}'
        f" <b>{mean(values)}</b></li>"
        for name, (_, values) in parts.items()
    )
    return (
        f'<div class="bars">{"".join(rows)}<div class="bar ruler"><b></b><div>{axis}</div></div>'
        f'<p class="unit">ms a step, mean of {run.ledger["measured_steps"]:,} measured steps; '
        "below, the mean over ranks</p></div>"
        f'<ul class="legend">{legend}</ul>{left_out}'
    )


# ---- traffic


def traffic(runs: Sequence[Run]) -> str:
    return cards(runs, _traffic)


def _traffic(place: int, run: Run) -> str:
    ledger = run.ledger
    rows = []
    for kind, sent in ledger["bytes_per_step"].items():
        if not sent:
            continue
        paths = ", ".join(
            f"{escape(path)} {figure(place, f'paths/{kind}/{path}', ledger, size)}"
            for path in sorted(ledger.get("paths", {}).get(kind, {}))
        )
        rows.append(
            [
                f'<i class="{colour(kind)}"></i>{escape(kind)}',
                figure(place, f"bytes_per_step/{kind}", ledger, size),
                figure(place, f"exposed_ms/{kind}", ledger, lambda v: f"{v:.2f} ms"),
                paths or "not recorded",
            ]
        )
    collided = figure(place, "collision_percent", ledger, lambda v: f"{v:.1f} %")
    words = (
        f"<p>Collisions: <b>{collided}</b> of a batch's requests are for rows that the batch "
        "before reads too.</p>"
    )
    if ledger.get("collision_percent") is None:
        words = "<p>Collisions: none recorded (tables replicated, or too few steps).</p>"
    return words + table(["traffic", "sent a step", "exposed", "carried by"], rows)


# ---- what the run was


def settings(runs: Sequence[Run]) -> str:
    """Every setting; those in which the runs differ first."""
    names = dict.fromkeys(
        (part, name) for run in runs for part in run.config for name in _part(run, part)
    )
    values = {key: [_part(run, key[0]).get(key[1]) for run in runs] for key in names}
    differ = [key for key in values if any(value != values[key][0] for value in values[key])]
    order = [*differ, *(key for key in values if key not in differ)]
    rows = [
        [f"{escape(key[0])}.{escape(key[1])}", *(f"{escape(str(v))}" for v in values[key])]
        for key in order
    ]
    head = ["setting", *(escape(run.name) for run in runs)]
    several = (
        f"<p>The runs differ in the first {len(differ)}.</p>" if len(runs) > 1 and differ else ""
    )
    return (
        f"<details><summary>{len(rows)} "
        f"settings</summary>{several}{table(head, rows, 'words')}</details>"
    )


def _part(run: Run, part: str) -> Mapping[str, Any]:
    found = run.config.get(part)
    return found if isinstance(found, Mapping) else {"": found}


def machines(runs: Sequence[Run]) -> str:
    return cards(runs, _machines, measured=False)


def _machines(place: int, run: Run) -> str:
    rows: list[list[str]] = []
    for one in run.ledger.get("machines", []):
        known = {
            name: value for name, value in one.items() if name not in ("ranks", "versions")
        } | one.get("versions", {})
        rows.append(["ranks", escape(", ".join(map(str, one["ranks"])))])
        rows += [
            [escape(name.replace("_", " ")), escape(str(value))]
            for name, value in known.items()
            if value is not None
        ]
    for rank, peak in enumerate(run.ledger.get("peak_memory_bytes_per_rank", [])[:BARS]):
        path = f"peak_memory_bytes_per_rank/{rank}"
        shown = (
            f"{escape(w)} {figure(place, f'{path}/{w}', run.ledger, lambda v: f'{v / 2**20:,.0f} MiB')}"
            for w in peak
        )
        rows.append([f"peak memory, rank {rank}", ", ".join(shown)])
    return table(["", "found"], rows, "words") if rows else "<p>Not recorded.</p>"
