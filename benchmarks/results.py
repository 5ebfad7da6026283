"""How results are kept: one JSON file per benchmark and testbed, with machine, versions, commit, date, rows and claims."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from freescale.bench.report import spread  # noqa: E402
from freescale.observe.machine import machine, versions  # noqa: E402

__all__ = ["claim", "commit", "machine", "spread", "versions", "write"]
FOLDER = ROOT / "benchmarks" / "results"


def commit() -> str:
    """The commit measured; `+` when files under src or benchmarks differ from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "src", "benchmarks/*.py", "benchmarks/peer"], cwd=ROOT, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def claim(text: str, asked: float, measured: float, unit: str, *, at_least: bool) -> dict[str, Any]:
    holds = measured >= asked if at_least else measured <= asked
    return {"claim": text, "asked": asked, "measured": round(measured, 4), "unit": unit, "holds": bool(holds)}


def write(
    name: str,
    testbed: str,
    command: str,
    rows: Sequence[Mapping],
    claims: Sequence[Mapping],
    packages: Sequence[str] = (),
    **more: Any,
) -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}-{testbed}.json"
    result = {
        "name": name,
        "command": command,
        "machine": machine(),
        "versions": versions(*packages),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **more,
        "rows": list(rows),
        "claims": list(claims),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for entry in claims:
        verdict = "holds" if entry["holds"] else "FAILS"
        print(f"{verdict}  {entry['claim']}: asked {entry['asked']}, measured {entry['measured']} {entry['unit']}")
    print(path.relative_to(ROOT))
    return path
