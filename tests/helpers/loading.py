"""`Histories` from flat options, for tests that vary them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from freescale.data import Histories, NegativeSpec, ReadSpec, SampleSpec, SplitSpec

SPECS = {"sample": SampleSpec, "split": SplitSpec, "negatives": NegativeSpec, "read": ReadSpec}


def build_specs(**options: Any) -> dict[str, Any]:
    """The specs of `Histories`, from their fields by name."""
    specs = {}
    for name, kind in SPECS.items():
        names = {field.name for field in fields(kind)} & options.keys()
        specs[name] = kind(**{each: options.pop(each) for each in names})
    assert not options, f"no spec has {', '.join(options)}"
    return specs


def load_histories(
    path: str | Path, global_batch: int, rank: int = 0, world: int = 1, **options: Any
) -> Histories:
    """`options`: fields of the specs."""
    return Histories(path, global_batch, rank=rank, world=world, **build_specs(**options))
