"""A run under a storm: starts it, lets the faults happen one after another, sees that it goes on
after each, and starts again what a scheduler would.

The ranks report when they reach the moment of the next fault, and wait there until it is done. A
run that makes no step for two minutes, whatever happens, has hung: the storm ends with the name of
the fault. After each fault its state is on disk: a storm that is interrupted goes on.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.events import Process, Struck, describe_event, split_time
from faults.forked import STACKS
from faults.plan import KINDS, Fault, put_off
from faults.reporter import LAUNCHER
from faults.testbed import LocalTestbed, kill

_LOOK = 0.05  # seconds between two looks at processes and clocks
_MOST_FAILURES = 20  # of launchers, one after another, without a step
_SHOWN = 10  # faults up to which the progress of the run is kept, for its picture
_RESUME = ("--resume", "auto")


class Hung(RuntimeError):
    """The run does not go on after a fault."""


@dataclass
class Storm:
    """Lets the faults of a plan happen to a run.

    Attributes:
        testbed: its processes, disk and network.
        command: `freescale WORDS` of the run, which begins it or goes on with it.
        faults: the plan; none for the undisturbed run.
        strikes: does what a fault is.
        state: file of what has happened so far.
        limit: seconds without a step, after which the run has hung.
    """

    testbed: LocalTestbed
    command: Sequence[str]
    faults: Sequence[Fault]
    strikes: Any
    state: Path
    listener: socket.socket
    limit: float
    events: list[dict[str, Any]] = field(default_factory=list)  # one for each fault that is over
    unplanned: int = 0  # attempts that ended without a fault
    wall: float = 0.0
    progress: list[tuple[float, int]] = field(default_factory=list)  # (seconds, step), at first

    def __post_init__(self) -> None:
        if self.state.exists():
            known = json.loads(self.state.read_text(encoding="utf-8"))
            self.events, self.unplanned = known["events"], known["unplanned"]
            self.wall, self.progress = known["wall"], known["progress"]
            self.faults = put_off(self.faults, len(self.events))
        self._next = len(self.events)  # fault that is armed, or to be
        self._armed_at: float | None = None
        self._struck: list[Struck] = []
        self.processes: dict[socket.socket, Process] = {}
        self._selector = selectors.DefaultSelector()
        self._failures = 0
        self._complete = [False] * len(self.testbed.launchers)
        self._heard = time.monotonic()
        self._began = time.monotonic()
        self._timers: list[tuple[float, Any]] = []
        self._gone = 0.0  # when the last rank ended
        self.step = self.attempts = 0

    # ---- the loop

    def run(self) -> None:
        """Until the run is complete and every fault has happened.

        Raises:
            Hung: it does not go on.
            RuntimeError: it fails again and again, or ended before the last fault.
        """
        self._selector.register(self.listener, selectors.EVENT_READ)
        try:
            while not all(self._complete):
                self._start_launchers()
                for key, _ in self._selector.select(_LOOK):
                    if key.fileobj is self.listener:
                        self._accept()
                    else:
                        self._read(self.processes[key.fileobj])  # type: ignore[index]
                self._wait_for_processes()
                self._run_timers()
                self._check_alive()
        finally:
            for process in [*self.testbed.launchers, *(p.pid for p in self.processes.values())]:
                kill(process)
            self._selector.close()
            for connection in self.processes:
                connection.close()
        self._settle(time.monotonic())
        self._save()
        self.wall += time.monotonic() - self._began
        if len(self.events) < len(self.faults):
            raise RuntimeError(
                f"the run was complete after {len(self.events)} of {len(self.faults)} faults"
            )

    def _start_launchers(self) -> None:
        for host, launcher in enumerate(self.testbed.launchers):
            missing = launcher is None and not self._complete[host]
            if missing and self._is_free(host) and self.testbed.may_start():
                self.testbed.start(host, [*self.command, *_RESUME], self._close_inherited)

    def _is_free(self, host: int) -> bool:
        """Whether no rank of an attempt before is left."""
        return not any(process.host == host for process in self.processes.values())

    def _close_inherited(self) -> None:
        self._selector.close()
        self.listener.close()
        for connection in self.processes:
            connection.close()

    def _wait_for_processes(self) -> None:
        with suppress(ChildProcessError):
            while True:
                child, status = os.waitpid(-1, os.WNOHANG)
                if not child:
                    return
                if child in self.testbed.launchers:
                    self._note_end(self.testbed.launchers.index(child), status)

    def _note_end(self, host: int, status: int) -> None:
        self.testbed.launchers[host] = None
        code = os.waitstatus_to_exitcode(status)
        self._complete[host] = code == 0
        self.testbed.note_end(code)
        if code and not self._struck:
            self._count_failure(f"launcher {host} ended with {code}")

    def _count_failure(self, what: str) -> None:
        self.unplanned += 1
        self._failures += 1
        print(f"  without a fault: {what}", flush=True)
        if self._failures > _MOST_FAILURES:
            said = self.testbed.said.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(
                f"the run fails again and again ({what}): {' / '.join(said[-3:])}; see "
                f"{self.testbed.said}"
            )

    def later(self, seconds: float, work: Any) -> None:
        """Calls `work()` after some seconds."""
        self._timers.append((time.monotonic() + seconds, work))

    def _run_timers(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._timers if entry[0] <= now]
        self._timers = [entry for entry in self._timers if entry[0] > now]
        for _, work in due:
            work()

    def _check_alive(self) -> None:
        if time.monotonic() - self._heard < self.limit:
            return
        for process in self.processes.values():
            kill(process.pid, STACKS)
        time.sleep(1.0)
        names = [f"fault {s.fault.number}, {s.fault.kind} at {s.moment}" for s in self._struck]
        after = "; ".join(names) or f"fault {self._next} is waited for"
        raise Hung(
            f"no step for {self.limit:.0f} s ({after}): where each thread is stands at the end of "
            f"{self.testbed.said}"
        )

    # ---- messages

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        process = Process(LAUNCHER, 0, 0, connection, time.monotonic())
        self.processes[connection] = process
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, process: Process) -> None:
        try:
            got = process.connection.recv(65536)
        except OSError:
            got = b""
        if not got:
            self._forget(process)
            return
        *lines, process.text = (process.text + got).split(b"\n")
        for line in lines:
            self._handle(process, json.loads(line))

    def _forget(self, process: Process) -> None:
        self._selector.unregister(process.connection)
        process.connection.close()
        del self.processes[process.connection]
        if process.rank != LAUNCHER:
            self._gone = time.monotonic()
            self.strikes.note_end(self, process)

    def _handle(self, process: Process, told: dict[str, Any]) -> None:
        if "hello" in told:
            process.rank, process.pid, process.host = told["hello"], told["pid"], told["host"]
            process.forked = told["forked"]
            self._note_attempt(process)
            self._arm(process)
        elif "passed" in told:
            process.passed[told["passed"]] = time.monotonic()
        elif "step" in told:
            self._note_step(process, told["step"])
        elif "missed" in told and self._is_next(told["missed"]):
            self._arm_all(moment="forward")
        elif "reached" in told:
            if self._is_next(told["reached"]):
                self._strike(told["moment"], process)
            self.send(process, {"go": told["reached"]})

    def _note_attempt(self, process: Process) -> None:
        if process.rank != 0:
            return
        self.attempts += 1
        if self.attempts > 1 and not self._struck:
            self._count_failure("the ranks were started again")

    def send(self, process: Process, told: dict[str, Any]) -> None:
        with suppress(OSError):  # it is gone
            process.connection.sendall(json.dumps(told).encode() + b"\n")

    def find(self, rank: int) -> Process | None:
        """The process of a rank, the last that came."""
        found = [process for process in self.processes.values() if process.rank == rank]
        return max(found, key=lambda process: process.joined, default=None)

    # ---- faults

    @property
    def _fault(self) -> Fault | None:
        return self.faults[self._next] if self._next < len(self.faults) else None

    def _is_next(self, number: int) -> bool:
        return self._fault is not None and self._fault.number == number

    def _is_due(self) -> bool:
        """Whether the next fault may happen: the run goes on after the one before, or is about to
        start again, if it is for then."""
        fault = self._fault
        if fault is None:
            return False
        return not self._struck or KINDS[fault.kind].is_of_start

    def _arm(self, process: Process, moment: str | None = None) -> None:
        fault = self._fault
        if fault is None or not self._is_due():
            return
        anyone = KINDS[fault.kind].moments == ("prepare",)
        armed = {"number": fault.number, "after": fault.after, "moment": moment or fault.moment}
        if fault.moment is None:
            armed["moment"] = "step is over"
        self.send(process, {"arm": armed | {"rank": None if anyone else self._choose_rank(fault)}})

    def _choose_rank(self, fault: Fault) -> int:
        """The present attempt may have fewer ranks than the plan."""
        return fault.rank % self.testbed.world

    def _arm_all(self, moment: str | None = None) -> None:
        for process in list(self.processes.values()):
            self._arm(process, moment)

    def _strike(self, moment: str, process: Process) -> None:
        fault = self._fault
        assert fault is not None
        if not self.strikes.is_possible(fault):
            self.later(0.2, lambda: self._arm_all())
            return
        self._next += 1
        if fault.moment is None:  # at any time after this step
            self.later(fault.delay, lambda: self._do(fault, f"{fault.delay:.3f} s after a step"))
        else:
            self._do(fault, moment, process)

    def _do(self, fault: Fault, moment: str, process: Process | None = None) -> None:
        rank, world = self._choose_rank(fault), self.testbed.world
        target = process or self.find(rank)
        seconds = self.strikes.strike(self, fault, target)
        now = self._heard = time.monotonic()
        over = None if KINDS[fault.kind].ends else now + seconds
        self._struck.append(Struck(fault, now, self.step, moment, over, rank, world))
        if self._is_due():  # for when the run starts again
            self.strikes.prepare(self._fault)

    def _note_step(self, process: Process, step: int) -> None:
        now = self._heard = time.monotonic()
        process.step, self._failures = step, 0
        if process.rank == 0:
            self.step = step
            if len(self.events) < _SHOWN:
                self.progress.append((round(self.wall + now - self._began, 3), step))
        waiting = [
            struck
            for struck in self._struck
            if (process.joined > struck.begin if struck.over is None else now > struck.over)
        ]
        if self._struck and len(waiting) == len(self._struck):
            self._settle(now)
            self._save()
            self._arm_all()

    def _settle(self, now: float) -> None:
        """The run has gone on after all faults so far."""
        alone = len(self._struck) == 1  # else the phases of several starts mix
        for struck in self._struck:
            start, there = self.wall - self._began, self.processes.values()
            phases = split_time(struck, self._gone, there, now) if alone else {}
            event = describe_event(struck, now, self.step, start, there)
            self.events.append(event | {"phases_s": phases})
            print(
                f"  {len(self.events):4d} of {len(self.faults)}: {struck.fault.kind} (rank "
                f"{struck.rank} of {struck.world}, {struck.moment}, step {struck.step}): "
                f"{now - struck.begin:.1f} s",
                flush=True,
            )
        self._struck = []

    def _save(self) -> None:
        wall = round(self.wall + time.monotonic() - self._began, 1)
        known = {"events": self.events, "unplanned": self.unplanned, "wall": wall}
        known["progress"] = self.progress
        temporary = self.state.with_suffix(".tmp")
        temporary.write_text(json.dumps(known), encoding="utf-8")
        temporary.replace(self.state)
