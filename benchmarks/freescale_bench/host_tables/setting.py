"""Sizes of `freescale bench host_tables`, for an H200 and its host, or for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from freescale.embedding.host_tables.tiers import parse_bytes
from freescale_bench.train.shapes import SHAPES, Shape
from freescale_bench.train.trained import SMALL, WARMUP, WINDOW

COUNTERS = ("cache_wanted", "cache_missed", "cache_bytes_up", "cache_bytes_down")
ROW_NUMBERS = 3  # per column of a row: its value and both of Adam's moments

# by (device, several ranks)
_DEFAULTS: dict[tuple[str, bool], dict[str, Any]] = {
    ("cuda", False): {"size": "90GB", "cache": "8GB", "shape": "long", "steps": 60},
    # Half a batch per rank: four ranks share the memory of one GPU.
    ("cuda", True): {
        "size": "20GB", "cache": "2GB", "shape": "long", "samples": 8, "steps": 40,
    },
    ("cpu", False): {"size": "16MB", "cache": "4MB", "shape": "trial", "steps": 20},
    ("cpu", True): {"size": "12MB", "cache": "4MB", "shape": "trial", "steps": 20},
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    device: str
    ranks: int
    keep: bool  # the result is written
    size: str  # rows and row state of each rank
    cache: str
    shape: str  # of `freescale bench train`, or "trial"
    samples: int  # per rank
    steps: int  # timed
    disk: str | None = None  # a folder

    def list_placements(self) -> dict[str, str]:
        """Placements of the item table, by arm."""
        arms = {"device": "sharded", "host": f"host:{self.cache}"}
        return arms | ({"disk": f"disk:{self.disk}:{self.cache}"} if self.disk else {})

    @property
    def items(self) -> int:
        """Rows of the table, over all ranks."""
        width = find_shape(self.shape).width
        return parse_bytes(self.size) * self.ranks // (width * 4 * ROW_NUMBERS)

    def make_shape(self) -> Shape:
        """The shape with enough batches for the whole run: no epoch repeats ids."""
        batches = WARMUP + self.steps + WINDOW
        return replace(
            find_shape(self.shape),
            items=self.items - 1,
            samples=self.samples * self.ranks,
            batches=batches,
            users=0,
        )

    def as_arguments(self) -> list[str]:
        """Returns the command line of this setting."""
        names = ("device", "size", "cache", "shape", "samples", "steps")
        words = [word for name in names for word in (f"--{name}", str(getattr(self, name)))]
        words += ["--nproc", str(self.ranks)]
        words += ["--disk", self.disk] if self.disk else []
        return words if self.keep else [*words, "--try"]


def find_shape(name: str) -> Shape:
    """Returns a shape by name. Raises ValueError for unknown names."""
    shapes = {**SHAPES, SMALL.name: SMALL}
    if name not in shapes:
        raise ValueError(f"there is no shape {name!r}: take one of {', '.join(shapes)}")
    return shapes[name]


def choose_setting(device: str, ranks: int, keep: bool, given: Mapping[str, Any]) -> Setting:
    """Fills in defaults for options that are None. A CPU run writes no result, because it says
    nothing about overlap."""
    if ranks < 1:
        raise ValueError(f"--nproc must be at least 1, got {ranks}")
    names = ("size", "cache", "shape", "samples", "steps", "disk")
    chosen = {name: given[name] for name in names if given.get(name) is not None}
    chosen = _DEFAULTS[device, ranks > 1] | chosen
    for name in ("size", "cache"):
        parse_bytes(chosen[name])
    if chosen["steps"] < WINDOW:
        raise ValueError(f"--steps must be at least {WINDOW}, got {chosen['steps']}")
    chosen.setdefault("samples", find_shape(chosen["shape"]).samples)
    return Setting(device, ranks, keep and device == "cuda", **chosen)
