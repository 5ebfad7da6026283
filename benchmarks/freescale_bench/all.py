"""`freescale bench all`: runs every benchmark that this machine supports, one after another. A
failure does not stop the rest."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from freescale.ledger.collector import describe_machine
from freescale_bench.common.options import make_parser, read_destination
from freescale_bench.common.repository import (
    find_commit,
    find_last_change,
    find_repository,
    package_path,
)
from freescale_bench.common.torchrec import set_up_peer
from freescale_bench.registry import Benchmark, Machine, choose, find_done, read_registry

FAILED, LEFT_OUT = "FAILED", "left out"


@dataclass
class Runner:
    """Runs benchmarks from the repository at `root`, or from an installed package (None), and
    writes results to `folder`."""

    root: Path | None
    folder: Path
    machine: Machine
    peer: str | None = None  # interpreter with TorchRec; None: not set up yet, empty: failed
    # by name: (outcome, details)
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def run(self, benchmarks: Sequence[Benchmark], skip_done: bool) -> int:
        """Returns the exit status: 1 if any benchmark failed."""
        waiting = []
        tree, here = find_commit(self.root), describe_machine()
        edited = find_last_change(self.root) if self.root else 0.0
        for one in benchmarks:
            date = (
                find_done(self.folder / self.machine.name_result(one), tree, edited, here)
                if skip_done
                else ""
            )
            if why := self.machine.find_lack(one):
                self.outcomes[one.name] = (LEFT_OUT, why)
            elif date:
                self.outcomes[one.name] = ("done before", f"{date}, this commit and machine")
            else:
                waiting.append(one)
        try:
            for place, one in enumerate(waiting):
                rest = waiting[place + 1 :]
                after = (
                    f"then {len(rest)} more, about {sum(r.minutes for r in rest):g} min"
                    if rest
                    else "the last"
                )
                print(
                    f"\n[{place + 1} of {len(waiting)}] {one.name}: about {one.minutes:g} min; "
                    f"{after}",
                    flush=True,
                )
                self.outcomes[one.name] = self._run(one)
        finally:
            self._show([one.name for one in benchmarks])
        return int(any(what == FAILED for what, _ in self.outcomes.values()))

    def _run(self, one: Benchmark) -> tuple[str, str]:
        python = sys.executable
        if "torchrec" in one.needs and self.root:
            if self.peer is None:
                try:
                    self.peer = set_up_peer(self.root)
                except ValueError as error:
                    self.peer = ""
                    print(error, file=sys.stderr)
            if not self.peer:
                return LEFT_OUT, "TorchRec could not be set up"
            python = self.peer
        result = self.folder / self.machine.name_result(one)
        before = result.stat().st_mtime_ns if result.exists() else 0
        begin = time.monotonic()
        try:
            status = self._start(self._make_command(one, python))
        except (OSError, ValueError) as error:
            return FAILED, str(error)
        minutes = f"{(time.monotonic() - begin) / 60:.1f} min"
        if status:
            return FAILED, f"status {status} after {minutes}"
        if not result.exists() or result.stat().st_mtime_ns == before:
            return FAILED, f"succeeded after {minutes}, but wrote no {result.name}"
        claims = json.loads(result.read_text(encoding="utf-8"))["claims"]
        hold = sum(entry["holds"] for entry in claims)
        return "done", f"{minutes}; {hold} of {len(claims)} claims hold; {result.name}"

    def _make_command(self, one: Benchmark, python: str) -> list[str]:
        file = os.path.abspath(self.machine.file) if self.machine.file else ""
        name, *words = (file if word == "{file}" else word for word in shlex.split(one.command))
        return [python, "-m", f"freescale_bench.{name}", *words, "--folder", str(self.folder)]

    def _start(self, command: Sequence[str]) -> int:
        """Returns the exit status of `command`."""
        environment = {**os.environ, "PYTHONPATH": package_path()}
        return subprocess.run(command, cwd=self.root, env=environment, check=False).returncode

    def _show(self, names: Sequence[str]) -> None:
        print()
        width = max(map(len, names), default=0)
        for name in names:
            what, more = self.outcomes.get(name, ("not reached", ""))
            print(f"{name:{width}}  {what}{': ' if more else ''}{more}")
        print(f"results: {self.folder}", flush=True)


def show_registry(benchmarks: Sequence[Benchmark], machine: Machine) -> None:
    """Prints every benchmark, and whether it can run here."""
    width = max(len(one.name) for one in benchmarks)
    for one in benchmarks:
        why = machine.find_lack(one)
        print(
            f"{one.name:{width}}  {one.minutes:3g} min  {machine.name_result(one):36}  "
            f"{f'left out: {why}' if why else 'runs here'}"
        )
    minutes = sum(one.minutes for one in benchmarks if not machine.find_lack(one))
    print(
        f"about {minutes:g} min on this machine; TorchRec is set up when first needed",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("all", __doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run this one; repeatable"
    )
    parser.add_argument(
        "--skip-done",
        action="store_true",
        help="skip what this commit has already measured on this machine, to resume a run",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the benchmarks, and which can run here"
    )
    parser.add_argument("--file", help="Parquet file for the benchmarks on real histories")
    options = parser.parse_args(arguments)
    if options.file and not Path(options.file).is_file():
        parser.error(f"there is no file {options.file}")
    benchmarks, machine = choose(read_registry(), options.only), Machine.inspect(options.file)
    if options.list:
        show_registry(benchmarks, machine)
        return 0
    folder = read_destination(options).find_folder().absolute()
    return Runner(find_repository(), folder, machine).run(benchmarks, options.skip_done)
