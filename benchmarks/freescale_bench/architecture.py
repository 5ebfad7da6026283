"""The architecture picture: a batch passing through the lanes of a rank, and the layers of the
library from pyproject.toml."""

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
_MODULES = {"__main__", "segments", "batch_codec", "sequences", "packed", "streams", "folders",
            "file_lock", "compiled", "worker_server", "pinning"}  # fmt: skip
_ABOUT = {
    "cli": "command line",
    "simulate": "steps on a cluster, predicted",
    "torchrec": "models and batches of TorchRec",
    "train": "trainer, checkpoints, evaluation, export",
    "launch": "processes of ranks, restarts, signals",
    "data": "readers, histories, negatives, workers",
    "report": "the page of a run",
    "pipeline": "schedules: serial, staged, one rank",
    "compress": "thresholded activations",
    "models": "HSTU, heads: nothing about ranks",
    "embedding": "sharded tables, exchange, row optimizers",
    "balance": "costs, partitioners, exchange of samples",
    "transport": "process groups, hostwire",
    "ledger": "spans, straggler and exposed time",
    "kernels": "plain torch and Triton, under one name",
    "batch": "jagged batches",
    "random": "keyed randomness",
    "config": "settings",
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
