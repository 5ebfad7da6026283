"""How results are kept: one JSON file per benchmark and testbed, with machine, versions, commit, date, rows and claims."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """CPU, cores, memory and GPU of this machine."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = model or _lscpu() or platform.machine()
    return {
        "cpu": cpu,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "gpu": gpu,
    }


def _lscpu() -> str | None:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), None)


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else ordered * 9
    return {"median": statistics.median(ordered), "p20": cuts[1], "p80": cuts[7], "repetitions": len(ordered)}


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
