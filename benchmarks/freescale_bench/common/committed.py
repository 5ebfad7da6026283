"""Results that are committed in the repository; figures, tables and calibrations are made of
them."""

from __future__ import annotations

from pathlib import Path

from freescale_bench.common.repository import require_repository
from freescale_bench.common.results import Result, read_result


def find_results() -> Path:
    """Their folder."""
    return require_repository() / "benchmarks" / "results"


def read_committed(name: str) -> Result:
    """The result NAME.json."""
    return read_result(find_results() / f"{name}.json")
