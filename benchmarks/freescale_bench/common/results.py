"""How results are kept: one JSON file per benchmark and testbed, with machine, versions, commit,
date, rows and claims."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from freescale.ledger.machine import describe_machine, get_versions
from freescale_bench.common.repository import find_commit, find_repository

Result = dict[str, Any]
Row = dict[str, Any]
Claim = dict[str, Any]

# Names that results of earlier runs use, and what they are called now.
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


@dataclass(frozen=True)
class Destination:
    """Where a result goes, and what it says was measured.

    Attributes:
        folder: by default benchmarks/results of the repository, or ./results without one.
        commit: by default that of the repository.
    """

    folder: Path | None = None
    commit: str | None = None

    def find_folder(self) -> Path:
        root = find_repository()
        return self.folder or (root / "benchmarks" / "results" if root else Path("results"))

    def as_arguments(self) -> list[str]:
        """For a rank that is started with a command line of its own."""
        commit = ["--commit", self.commit] if self.commit else []
        return ["--folder", str(self.find_folder().absolute()), *commit]


class Target(NamedTuple):
    """What was asked of a figure of a benchmark."""

    figure: str
    text: str
    value: float
    unit: str
    at_least: bool = True


def at_least(text: str, target: float, measured: float, unit: str) -> Claim:
    """A target beside what was measured, and whether it is met."""
    return _make_claim(text, target, measured, unit, measured >= target)


def at_most(text: str, target: float, measured: float, unit: str) -> Claim:
    """The same where less is better."""
    return _make_claim(text, target, measured, unit, measured <= target)


def _make_claim(text: str, target: float, measured: float, unit: str, holds: bool) -> Claim:
    found: Claim = {"claim": text, "asked": target, "measured": round(measured, 4)}
    return found | {"unit": unit, "holds": bool(holds)}


def make_claims(targets: Iterable[Target], figures: Mapping[str, float]) -> list[Claim]:
    """A claim for each figure that was asked for and measured."""
    return [
        (at_least if one.at_least else at_most)(one.text, one.value, figures[one.figure], one.unit)
        for one in targets
        if one.figure in figures
    ]


def show_claims(claims: Iterable[Mapping[str, Any]]) -> None:
    for entry in claims:
        print(
            f"{'holds' if entry['holds'] else 'FAILS'}  {entry['claim']}: asked {entry['asked']}, "
            f"measured {entry['measured']} {entry['unit']}"
        )


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
    """Writes NAME-TESTBED.json, prints its claims and its path.

    Args:
        command: what makes this result again.
        packages: whose versions are kept beside torch's.
        more: what else the file says, before its rows.
    """
    folder = to.find_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{testbed}.json"
    result = {
        "name": name,
        "command": command,
        "machine": describe_machine(),
        "versions": get_versions(*packages),
        "commit": to.commit or find_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **more,
        "rows": list(rows),
        "claims": list(claims),
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show_claims(claims)
    print(path)
    return path


def read_result(path: Path) -> Result:
    """A result, with today's names in those of earlier runs: its command, arms and options."""
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


def update_command(command: str) -> str:
    """The command that makes a result of an earlier run today."""
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
