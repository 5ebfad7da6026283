"""Results: one JSON file per benchmark and testbed, with machine, versions, commit, date, rows and
claims."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from freescale_bench.common.repository import find_commit, find_repository, require_repository

Result = dict[str, Any]
Row = dict[str, Any]
Claim = dict[str, Any]

# Old names in results of earlier runs, and today's.
_OLD_SCRIPTS = {
    "bench_balance_measured": "balance measured",
    "bench_priority_gpu": "staged --device cuda",
    "bench_ladder_gpu": "ladder --device cuda",
}
_OLD_COMMAND = re.compile(
    r"(?:torchrun --nproc-per-node (?P<ranks>\d+)|\S*python3?) "
    r"benchmarks/(?P<script>\w+)\.py(?P<options>.*)"
)
_SNAPSHOTS = re.compile(r"freescale bench snapshot(?: (restore))?")
_OLD_WORDS = {"dense by parts": "dense partitioned"}
_OLD_DENSE_SUMS = {"parts": "partitioned"}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, and the number of values."""
    ordered = sorted(values)
    cuts = (
        statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else ordered * 9
    )
    return {
        "median": statistics.median(ordered),
        "p20": cuts[1],
        "p80": cuts[7],
        "repetitions": len(ordered),
    }


@dataclass(frozen=True)
class Destination:
    """The folder of a result, and the measured commit.

    Attributes:
        folder: benchmarks/results of the repository by default, else ./results.
        commit: the repository's by default.
    """

    folder: Path | None = None
    commit: str | None = None

    def find_folder(self) -> Path:
        root = find_repository()
        return self.folder or (root / "benchmarks" / "results" if root else Path("results"))

    def as_arguments(self) -> list[str]:
        """Returns the options that pass this to a rank."""
        commit = ["--commit", self.commit] if self.commit else []
        return ["--folder", str(self.find_folder().absolute()), *commit]


class Target(NamedTuple):
    """The target of a figure of a benchmark."""

    figure: str
    text: str
    value: float
    unit: str
    at_least: bool = True


def at_least(text: str, target: float, measured: float, unit: str) -> Claim:
    """A target, the measured value, and whether the value is at least the target."""
    return _make_claim(text, target, measured, unit, measured >= target)


def at_most(text: str, target: float, measured: float, unit: str) -> Claim:
    """A target, the measured value, and whether the value is at most the target."""
    return _make_claim(text, target, measured, unit, measured <= target)


def _make_claim(text: str, target: float, measured: float, unit: str, holds: bool) -> Claim:
    found: Claim = {"claim": text, "asked": target, "measured": round(measured, 4)}
    return found | {"unit": unit, "holds": bool(holds)}


def make_claims(targets: Iterable[Target], figures: Mapping[str, float]) -> list[Claim]:
    """Makes a claim for each target whose figure was measured."""
    return [
        (at_least if one.at_least else at_most)(one.text, one.value, figures[one.figure], one.unit)
        for one in targets
        if one.figure in figures
    ]


def show_claims(claims: Iterable[Mapping[str, Any]]) -> None:
    for entry in claims:
        print(
            f"{'holds' if entry['holds'] else 'FAILS'}  {entry['claim']}: target {entry['asked']}, "
            f"measured {entry['measured']} {entry['unit']}"
        )


def describe_run(packages: Sequence[str] = (), commit: str | None = None) -> dict[str, Any]:
    """Machine, versions, commit (the repository's by default) and date."""
    from freescale.ledger.collector import describe_machine, get_versions  # imports torch

    return {
        "machine": describe_machine(),
        "versions": get_versions(*packages),
        "commit": commit or find_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def write(
    name: str,
    testbed: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    claims: Sequence[Mapping[str, Any]],
    packages: Sequence[str] = (),
    *,
    to: Destination,
    **more: Any,
) -> Path:
    """Writes NAME-TESTBED.json. Prints its claims and its path.

    Args:
        command: the command that reproduces this result.
        packages: recorded with their versions, in addition to torch.
        more: further entries of the file, before its rows.
    """
    folder = to.find_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{testbed}.json"
    result = {
        "name": name,
        "command": command,
        **describe_run(packages, to.commit),
        **more,
        "rows": list(rows),
        "claims": list(claims),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show_claims(claims)
    print(path)
    return path


def read_result(path: Path) -> Result:
    """Reads a result. Old names of commands, arms and options become today's."""
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    if "command" in result:
        result["command"] = update_command(result["command"])
    for row in result.get("rows", []):
        if "arm" in row:
            for old, new in _OLD_WORDS.items():
                row["arm"] = row["arm"].replace(old, new)
        if "dense_sums" in row.get("options", {}):
            sums = row["options"]["dense_sums"]
            row["options"]["dense_sums"] = _OLD_DENSE_SUMS.get(sums, sums)
    return result


def read_committed(name: str) -> Result:
    """Reads NAME.json of the repository's results."""
    return read_result(require_repository() / "benchmarks" / "results" / f"{name}.json")


def update_command(command: str) -> str:
    """Translates the command of an earlier result to today's."""
    command = _SNAPSHOTS.sub(lambda m: f"freescale bench checkpoint {m[1] or 'snapshots'}", command)
    found = _OLD_COMMAND.fullmatch(command)
    if found is None:
        return command
    script = found["script"]
    name = _OLD_SCRIPTS.get(script, script.removeprefix("bench_"))
    ranks = f" --nproc {found['ranks']}" if found["ranks"] else ""
    options = found["options"]
    if "--device cuda" in name:
        options = options.replace(" --device cuda", "")
    return f"freescale bench {name}{ranks}{options}"
