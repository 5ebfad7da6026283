"""`freescale bench all`: runs the repository's benchmarks one after another, and goes on when one
fails."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from freescale.bench.ranks import divided_gpu, queues
from freescale.bench.registry import Benchmark, Machine, chosen, done_before, read_registry
from freescale.bench.repository import changed, commit, peer_python
from freescale.ledger.machine import describe_machine

FAILED, LEFT_OUT = "FAILED", "left out"


@dataclass
class Runner:
    """Runs benchmarks of the repository at `root`, with results in `folder`."""

    root: Path
    folder: Path
    machine: Machine
    peer: str | None = None  # the interpreter with TorchRec, once it is there
    # by name: what happened, and more of it
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def run(self, benchmarks: Sequence[Benchmark], skip_done: bool) -> int:
        """The exit status: 1 if one failed."""
        waiting = []
        tree, edited, here = commit(self.root), changed(self.root), describe_machine()
        for one in benchmarks:
            date = (
                done_before(self.folder / self.machine.result_of(one), tree, edited, here)
                if skip_done
                else ""
            )
            if why := self.machine.lacks(one):
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
                    (
                        f"\n[{place + 1} of {len(waiting)}] {one.name}: about {one.minutes:g} min; "
                        f"{after}"
                    ),
                    flush=True,
                )
                self.outcomes[one.name] = self._run(one)
        finally:
            self._show([one.name for one in benchmarks])
        return int(any(what == FAILED for what, _ in self.outcomes.values()))

    def _run(self, one: Benchmark) -> tuple[str, str]:
        if "torchrec" in one.needs and self.peer is None:
            try:
                self.peer = peer_python(self.root)
            except ValueError as error:
                self.peer = ""
                print(error, file=sys.stderr)
        if "torchrec" in one.needs and not self.peer:
            return LEFT_OUT, "TorchRec could not be set up"
        result = self.folder / self.machine.result_of(one)
        before = result.stat().st_mtime_ns if result.exists() else 0
        begin = time.monotonic()
        try:
            status = self._start(one)
        except (OSError, ValueError) as error:
            return FAILED, str(error)
        minutes = f"{(time.monotonic() - begin) / 60:.1f} min"
        if status:
            return FAILED, f"status {status} after {minutes}"
        if not result.exists() or result.stat().st_mtime_ns == before:
            return FAILED, f"ended well after {minutes}, but wrote no {result.name}"
        claims = json.loads(result.read_text(encoding="utf-8"))["claims"]
        hold = sum(entry["holds"] for entry in claims)
        return "done", f"{minutes}; {hold} of {len(claims)} claims hold; {result.name}"

    def _start(self, one: Benchmark) -> int:
        places = {
            "{python}": sys.executable,
            "{peer}": self.peer,
            "{file}": self.machine.file and os.path.abspath(self.machine.file),
        }
        words = [places.get(word) or word for word in shlex.split(one.command)]
        # A variable and not an option: the one function that writes results reads it, and no
        # benchmark has to pass it on.
        environment = {**os.environ, "FREESCALE_RESULTS": str(self.folder)}
        with ExitStack() as stack:
            if one.ranks > self.machine.gpus:
                environment |= stack.enter_context(divided_gpu(one.ranks))
                environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", queues(one.ranks))
            return subprocess.run(words, cwd=self.root, env=environment, check=False).returncode

    def _show(self, names: Sequence[str]) -> None:
        print()
        width = max(map(len, names), default=0)
        for name in names:
            what, more = self.outcomes.get(name, ("not reached", ""))
            print(f"{name:{width}}  {what}{': ' if more else ''}{more}")
        print(f"results: {self.folder}", flush=True)


def show_registry(benchmarks: Sequence[Benchmark], machine: Machine) -> None:
    """What there is, and what of it would run here."""
    width = max(len(one.name) for one in benchmarks)
    for one in benchmarks:
        why = machine.lacks(one)
        print(
            f"{one.name:{width}}  {one.minutes:3g} min  {machine.result_of(one):36}  "
            f"{f'left out: {why}' if why else 'runs here'}"
        )
    minutes = sum(one.minutes for one in benchmarks if not machine.lacks(one))
    print(
        f"about {minutes:g} min on this machine; TorchRec is set up when the first needs it",
        flush=True,
    )


def bench_all(
    root: Path,
    only: Sequence[str],
    skip_done: bool,
    listed: bool,
    file: str | None,
    folder: Path | None,
) -> int:
    benchmarks, machine = chosen(read_registry(root), only), Machine.here(file)
    if listed:
        show_registry(benchmarks, machine)
        return 0
    return Runner(root, (folder or root / "benchmarks" / "results").absolute(), machine).run(
        benchmarks, skip_done
    )
