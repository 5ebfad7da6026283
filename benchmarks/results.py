"""How results are kept: one JSON file per benchmark and testbed, with machine, versions, commit,
date, rows and claims."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from freescale.bench.report import spread  # noqa: E402
from freescale.bench.repository import commit as commit_of  # noqa: E402
from freescale.ledger.machine import describe_machine, get_gpu_name, get_gpu_settings, get_versions  # noqa: E402

__all__ = [
    "Asked",
    "claim",
    "claims_of",
    "commit",
    "get_gpu_name",
    "describe_machine",
    "get_gpu_settings",
    "spread",
    "get_versions",
    "write",
]
FOLDER = ROOT / "benchmarks" / "results"


def commit() -> str:
    """The commit measured; `+` when files under src or benchmarks differ from it."""
    return commit_of(ROOT)


def claim(text: str, asked: float, measured: float, unit: str, *, at_least: bool) -> dict[str, Any]:
    holds = measured >= asked if at_least else measured <= asked
    return {
        "claim": text,
        "asked": asked,
        "measured": round(measured, 4),
        "unit": unit,
        "holds": bool(holds),
    }


class Asked(NamedTuple):
    """What was asked of a figure of a benchmark."""

    figure: str
    text: str
    value: float
    unit: str
    at_least: bool = True


def claims_of(asked: Iterable[Asked], figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """A claim for each figure that was asked for and measured."""
    return [
        claim(one.text, one.value, figures[one.figure], one.unit, at_least=one.at_least)
        for one in asked
        if one.figure in figures
    ]


def write(
    name: str,
    testbed: str,
    command: str,
    rows: Sequence[Mapping],
    claims: Sequence[Mapping],
    packages: Sequence[str] = (),
    **more: Any,
) -> Path:
    """Into benchmarks/results, or where `freescale bench all --folder` says (FREESCALE_RESULTS);
    the path is printed."""
    folder = Path(os.environ.get("FREESCALE_RESULTS", FOLDER))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{testbed}.json"
    result = {
        "name": name,
        "command": command,
        "machine": describe_machine(),
        "versions": get_versions(*packages),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **more,
        "rows": list(rows),
        "claims": list(claims),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for entry in claims:
        verdict = "holds" if entry["holds"] else "FAILS"
        print(
            f"{verdict}  {entry['claim']}: asked {entry['asked']}, measured {entry['measured']} "
            f"{entry['unit']}"
        )
    print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
    return path
