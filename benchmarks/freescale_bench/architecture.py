"""The architecture pictures: a batch passing through the lanes of a rank, the layers of the library
from pyproject.toml, and the tables with the phases of a request."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from freescale_bench.common import drawing as svg

_WIDE, _LEFT, _ROW = 860, 96, 46
# By lane: (begin, end, text, ink), in units of the step of batch i.
_LANES: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]] = (
    ("compute", ((0.0, 0.46, "forward i", svg.BLUE), (0.46, 0.9, "backward i", svg.BLUE))),
    ("main", ((0.9, 1.1, "dense sums, step", svg.GREY),)),
    ("input", ((0.02, 0.62, "batch i+2: agree, balance, move samples", svg.GREEN),)),
    (
        "ahead",
        (
            (0.02, 0.2, "ids i+1", svg.TEAL),
            (0.2, 0.3, "compare", svg.TEAL),
            (0.3, 0.5, "deferred grads i-1", svg.ORANGE),
            (0.5, 0.86, "rows i+1 that i does not update", svg.TEAL),
        ),
    ),
    ("urgent", ((0.9, 1.03, "grads", svg.RED), (1.03, 1.16, "rows", svg.RED))),
)
# Layers left out of the picture: single modules rather than packages.
_MODULES = {"__main__", "batch_codec", "sequences", "packed", "streams", "folders",
            "file_lock", "compiled", "worker_server", "pinning", "visible"}  # fmt: skip
_ABOUT = {
    "cli": "command line",
    "simulate": "steps on a cluster, predicted",
    "torchrec": "models and batches of TorchRec",
    "recommend": "load, recommend, export, serve",
    "train": "trainer, checkpoints, evaluation",
    "launch": "processes of ranks, restarts, signals",
    "data": "readers, histories, negatives, workers",
    "report": "the page of a run",
    "pipeline": "schedules: serial, staged, one rank",
    "models": "HSTU, heads: nothing about ranks",
    "embedding": "sharded tables, exchange, row optimizers",
    "balance": "costs, partitioners, exchange of samples",
    "transport": "process groups, hostwire",
    "ledger": "spans, straggler and exposed time",
    "kernels": "plain torch and Triton, under one name",
    "batch": "jagged batches",
    "random": "keyed randomness",
    "config": "settings",
    "stores": "paths in object stores",
}


def read_layers(root: Path) -> list[str]:
    """Lists the packages, from the highest layer to the lowest."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    layers: list[str] = contracts[0]["layers"]
    return [layer for layer in layers if layer not in _MODULES]


def draw_architecture(layers: Sequence[str]) -> str:
    """Draws both parts, one above the other."""
    lanes_high = 44 + _ROW * len(_LANES) + 54
    columns = 3
    rows = -(-len(layers) // columns)
    high = lanes_high + 50 + rows * 40 + 20
    parts = svg.begin(_WIDE, high)
    parts.append(svg.text(14, 24, "A step of one rank, staged", more='font-weight="bold"'))
    scale = (_WIDE - _LEFT - 20) / 1.18
    for number, (lane, spans) in enumerate(_LANES):
        top = 44 + _ROW * number
        parts.append(svg.text(14, top + 20, lane))
        parts.append(svg.rect(_LEFT, top, _WIDE - _LEFT - 20, _ROW - 14, "#f5f5f5"))
        for begin, end, words, ink in spans:
            x, wide = _LEFT + begin * scale, (end - begin) * scale - 2
            parts.append(
                svg.rect(x, top, wide, _ROW - 14, ink, more=f'fill-opacity="0.22" stroke="{ink}"')
            )
            parts.append(svg.text(x + 6, top + 20, words, style=svg.SMALL.replace("#666", "#222")))
    edge = _LEFT + 0.9 * scale
    below = 44 + _ROW * len(_LANES) - 8
    parts.append(svg.rule(edge, 38, edge, below, "#999", more='stroke-dasharray="4 3"'))
    notes = (
        "The forward of batch i+1 waits for the rows of 'ahead' and 'urgent', and the dense step.",
        "Gradients of rows that i+1 does not read are deferred to the next step's 'ahead'.",
    )
    for number, note in enumerate(notes):
        parts.append(svg.text(14, below + 20 + 15 * number, note, style=svg.SMALL))
    top = lanes_high + 20
    title = "The layers: each imports only those below it"
    parts.append(svg.text(14, top, title, more='font-weight="bold"'))
    wide = (_WIDE - 28) / columns
    for number, layer in enumerate(layers):
        column, row = divmod(number, rows)
        x, y = 14 + column * wide, top + 14 + row * 40
        parts.append(
            svg.rect(
                x,
                y,
                wide - 8,
                34,
                svg.BLUE,
                more=f'rx="4" fill-opacity="0.08" stroke="{svg.BLUE}" stroke-opacity="0.4"',
            )
        )
        parts.append(svg.text(x + 8, y + 15, layer, more='font-weight="bold"'))
        parts.append(svg.text(x + 8, y + 28, _ABOUT[layer], style=svg.SMALL))
    return svg.finish(parts)


# The phases of a request, with where each happens and what it is for.
_PHASES = (
    ("RequestedIds", "the rank that reads", "ids of a batch"),
    ("Requested", "reader and owners", "keys, sorted by owner"),
    ("Resident", "the owners", "slots of these rows"),
    ("rows", "the rank that reads", "what the model sees"),
    ("gradients", "the rank that reads", "one for each row"),
    ("update", "the owners", "each row once a step"),
)
_VERBS = ("request →", "resolve →", "↓ fetch", "← backward", "← collect")  # to the next phase
_GROUPS = (
    ("sharded", "rows divided over the ranks: four AllToAlls"),
    ("replicated", "whole on every rank: one AllReduce"),
    ("local", "one rank: read in place"),
)
_STORAGES = (
    ("device", "all rows in its memory"),
    ("cached", "rows in host memory or a file, a cache on the device"),
    ("dynamic", "ids come and go, over device or cached"),
)


def draw_tables() -> str:
    """The phases of a request, above the groups and storages that it goes through."""
    parts = svg.begin(_WIDE, 438)
    parts.append(svg.text(14, 24, "The phases of a request", more='font-weight="bold"'))
    columns, wide, gap, high = 3, 226, 77, 62
    for number, (phase, where, what) in enumerate(_PHASES):
        row, column = divmod(number, columns)
        if row:  # back from right to left
            column = columns - 1 - column
        x, top = 14.0 + column * (wide + gap), 40 + row * (high + 36)
        parts += _draw_box(x, top, wide, high, phase, (where, what), svg.TEAL)
        if number + 1 < len(_PHASES):
            verb = _VERBS[number]
            left, below = (x - gap + 6.0 if row else x + wide + 6.0), top + high / 2 + 4
            if number + 1 == columns:
                left, below = x + wide / 2, top + high + 22.0
            parts.append(svg.text(left, below, verb, style=svg.SMALL))
    note = "Staged divides Requested by what consecutive batches share: RowParts, GradientParts."
    parts.append(svg.text(14, 228, note, style=svg.SMALL))
    for title, x, boxes, ink in (
        ("Groups: request, fetch, collect, update", 14, _GROUPS, svg.BLUE),
        ("Storages: resolve, gather, update", _WIDE / 2 + 7, _STORAGES, svg.ORANGE),
    ):
        parts.append(svg.text(x, 262, title, more='font-weight="bold"'))
        for number, (name, about) in enumerate(boxes):
            top = 276 + number * 52
            parts += _draw_box(x, top, _WIDE / 2 - 28, 42, name, (about,), ink)
    return svg.finish(parts)


def _draw_box(
    x: float, top: float, wide: float, high: float, name: str, lines: Sequence[str], ink: str
) -> list[str]:
    style = f'rx="4" fill-opacity="0.08" stroke="{ink}" stroke-opacity="0.4"'
    found = [svg.rect(x, top, wide, high, ink, more=style)]
    found.append(svg.text(x + 8, top + 17, name, more='font-weight="bold"'))
    for number, line in enumerate(lines):
        found.append(svg.text(x + 8, top + 32 + 15 * number, line, style=svg.SMALL))
    return found
