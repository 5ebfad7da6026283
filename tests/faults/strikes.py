"""What each kind of faults does to a run."""

from __future__ import annotations

import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from faults.hosts_testbed import HostsTestbed
from faults.plan import KINDS, Fault
from faults.testbed import fill_disk, kill
from freescale.launch.attempts import forget_attempt
from freescale.train.state.holder_link import read_run_id

if TYPE_CHECKING:
    from faults.events import Process
    from faults.storm import Storm

_STALL = 20.0  # seconds that a stall lasts longer than --timeout, unless the others end before
_STILL_FULL = 0.2  # seconds that the disk stays full after the first rank has failed


class Strikes:
    """Of one run."""

    def __init__(self, run: Path, cache: Path, timeout: float) -> None:
        """
        Args:
            run: folder of the run.
            cache: of prepared data.
            timeout: of the run's collectives.
        """
        self._run, self._cache, self._timeout = run, cache, timeout
        self._ballast, self._full = run.parent / "ballast", False
        self._stalled: int | None = None

    # ---- what the storm asks

    def clear(self) -> None:
        """Before a storm goes on that was interrupted: what a fault has left is removed, and the
        run does not count its end as one of its own. The fault comes again."""
        self._ballast.unlink(missing_ok=True)
        forget_attempt(self._run)

    def is_possible(self, fault: Fault) -> bool:
        """A checkpoint is damaged only if there is another one."""
        return fault.kind != "damage" or len(self._list_checkpoints()) > 1

    def prepare(self, fault: Fault | None) -> None:
        """Before an attempt at the run starts in which the fault happens."""
        if fault is not None and KINDS[fault.kind].moments == ("prepare",):
            shutil.rmtree(self._cache, ignore_errors=True)

    def note_end(self, storm: Storm, process: Process) -> None:
        """A rank has ended."""
        if self._stalled not in (None, process.pid):
            kill(self._stalled, signal.SIGCONT)
            self._stalled = None
        if self._full:
            self._full = False
            storm.later(_STILL_FULL, self._ballast.unlink)

    def strike(self, storm: Storm, fault: Fault, target: Process | None) -> float:
        """Lets the fault happen. Returns the seconds after which a disturbance is over."""
        process = target.pid if target is not None else None
        host = target.host if target is not None else 0
        launcher = storm.testbed.launchers[host]
        if fault.kind.startswith("kill in") or fault.kind == "kill rank":
            kill(process)
        elif fault.kind == "kill keeper":
            for holder in self._find_holders(storm, host):
                kill(holder)
            kill(process)
        elif fault.kind == "kill launcher":
            kill(launcher)
        elif fault.kind in ("kill machine", "damage"):
            self._kill_machine(storm, host if fault.kind == "kill machine" else None)
            if fault.kind == "damage":
                self._damage_newest(fault.draw)
        elif fault.kind == "preempt launcher":
            kill(launcher, signal.SIGTERM)
        elif fault.kind == "preempt rank":
            kill(process, signal.SIGUSR1)
        elif fault.kind in ("stall", "pause"):
            seconds = fault.seconds if fault.kind == "pause" else self._timeout + _STALL
            kill(process, signal.SIGSTOP)
            self._stalled = process if fault.kind == "stall" else None
            storm.later(seconds, lambda: kill(process, signal.SIGCONT))
            return seconds
        elif fault.kind == "clock":
            hour = 3600.0 if fault.draw % 2 else -3600.0
            if target is not None:
                storm.send(target, {"jump": hour})
        elif fault.kind == "disk full":
            self._full = True
            fill_disk(self._ballast)
        else:
            return self._disturb_link(storm, fault, host)
        return 0.0

    # ---- how

    def _disturb_link(self, storm: Storm, fault: Fault, host: int) -> float:
        testbed = storm.testbed
        assert isinstance(testbed, HostsTestbed)
        seconds = fault.seconds
        if fault.kind in ("link down", "link drops"):
            seconds += self._timeout if fault.kind == "link down" else 0.0
            testbed.set_link(host, up=False)
            storm.later(seconds, lambda: testbed.set_link(host, up=True))
        elif fault.kind == "link loses":
            testbed.lose_packets(host, lose=True)
            storm.later(seconds, lambda: testbed.lose_packets(host, lose=False))
        else:
            assert fault.kind == "link slow", fault.kind
            testbed.slow_link(host, slow=True)
            storm.later(seconds, lambda: testbed.slow_link(host, slow=False))
        return seconds

    def _kill_machine(self, storm: Storm, host: int | None) -> None:
        """All processes of a host, or of all of them, the launcher first: it starts none again."""
        for place, launcher in enumerate(storm.testbed.launchers):
            if host in (None, place):
                kill(launcher)
        for process in storm.processes.values():
            if host in (None, process.host) and process.pid:
                kill(process.pid)
        for holder in self._find_holders(storm, host):
            kill(holder)

    def _find_holders(self, storm: Storm, host: int | None) -> list[int]:
        """Processes that hold snapshots of the run, on a host or on all of them."""
        run, found = read_run_id(self._run), []
        if run is None:
            return []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_own = f"freescale-holder-{run}-".encode() in (folder / "cmdline").read_bytes()
                if is_own and (host is None or storm.testbed.is_on(int(folder.name), host)):
                    found.append(int(folder.name))
        return found

    def _list_checkpoints(self) -> list[Path]:
        return sorted((self._run / "checkpoints").glob("step-*[0-9]"))

    def _damage_newest(self, draw: int) -> None:
        """A byte changes, or a file is cut short or gone."""
        chance = random.Random(draw)
        files = sorted(path for path in self._list_checkpoints()[-1].iterdir())
        path = chance.choice(files)
        how = chance.choice(("byte", "cut", "gone"))
        size = path.stat().st_size
        if how == "gone" or not size:
            path.unlink()
        elif how == "cut":
            os.truncate(path, chance.randrange(size))
        else:
            with open(path, "r+b") as file:
                file.seek(chance.randrange(size))
                old = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([old ^ (1 << chance.randrange(8))]))
