"""Starts and watches the ranks of this machine. If one fails, all are stopped and the exit status
reports the failure."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from freescale.launch.signals import REQUEUE, SIGNALS, is_second
from freescale.transport.shared_gpu import GpuBusy
from freescale.worker_server import count_cores

LAUNCHER = "FREESCALE_LAUNCHER"  # process id of the launcher, set for its ranks
# environment variables that identify a rank
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    LAUNCHER,
)
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
# seconds after a failure until the other ranks get SIGTERM. Connected ranks notice a failure
# earlier; ranks that still wait at the rendezvous do not.
_NOTICE = 4.0
# grace period on GPU machines after a signal killed a rank. Then all are killed: inside a GPU
# collective they would notice only after --timeout.
_KILL_GRACE = 0.5
_GPUS = Path("/dev/nvidiactl")
_GRACE = 20.0  # seconds after a failure until ranks that still run are stopped
_BUSY = 20.0  # seconds in which ranks are started again if exiting processes still hold their GPU


class RankProcess(Protocol):
    """The part of Popen's interface that the launcher uses."""

    @property
    def stderr(self) -> IO[str] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None:
        """Does nothing once the process has ended."""


StartRank = Callable[[Sequence[str], Mapping[str, str]], RankProcess]  # command, environment


def is_rank() -> bool:
    """Whether torchrun or `launch` started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def has_launcher() -> bool:
    """Whether `launch` started this process and handles its failures."""
    return LAUNCHER in os.environ


def follow_launcher() -> None:
    """Asks the kernel to send this rank SIGTERM when its launcher (`launch` or torchrun) dies. The
    rank then saves, exits and releases the run's folder. Linux only; elsewhere ranks outlive their
    launcher."""
    launcher, torchrun = os.environ.get(LAUNCHER), "TORCHELASTIC_RUN_ID" in os.environ
    if not (launcher or torchrun) or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
    if launcher is not None and os.getppid() != int(launcher):  # it died before prctl
        os.kill(os.getpid(), signal.SIGTERM)


def find_free_port() -> int:
    """Finds a free port below the ephemeral range (on Linux from 32,768 by default). Ranks take
    seconds to start listening, and an ephemeral port may be in use by then."""
    for _ in range(100):
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(
        "no free port between 15,000 and 30,000 was found in 100 tries: name one with --port"
    )


def check_port(port: int) -> None:
    """Raises ValueError if the port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise ValueError(
                f"port {port} is in use: choose another --port, or leave it out for a free one"
            ) from None


@dataclass
class Ended:
    """How the ranks ended."""

    failed: tuple[int, int] | None  # (rank, status) of the failure; None: all succeeded
    number: int  # of the first signal that the launcher received, or 0
    last_lines: dict[int, str] = field(default_factory=dict)  # by rank, of standard error
    when: float = 0.0  # time of the first failure, since 1970

    @property
    def is_stopped(self) -> bool:
        """Whether the ranks stopped on purpose; rank 0 has printed what was saved."""
        return self.failed is not None and _is_stop(self.failed[1])

    def describe(self) -> str:
        """Describes the failure."""
        assert self.failed is not None
        rank, status = self.failed
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        if status == -signal.SIGBUS:
            how += " (a memory-mapped file was truncated, or its disk failed)"
        return f"rank {rank} {how}"


def launch(arguments: Sequence[str], ranks: int, port: int | None = None, **options: Any) -> int:
    """Runs local ranks as `run_ranks` does, and prints what went wrong. Returns 0 if all ranks
    succeeded, 1 after a failure, `choose_status` if a signal stopped the run."""
    return report_end(run_ranks(arguments, ranks, port, **options))


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    port: int | None = None,  # port of the rendezvous; None finds a free one
    *,
    module: str = "freescale",
    # (rank) -> additional environment variables for that rank
    extra: Callable[[int], Mapping[str, str]] = lambda rank: {},
    seconds: float | None = None,  # time limit, after which all ranks are stopped
    start: StartRank | None = None,  # replaces `start_rank`
) -> Ended:
    """Runs `python -m MODULE ARGUMENTS` as local ranks, and returns how they ended. TimeoutError if
    they run longer than `seconds`, ValueError if `port` is in use."""
    if port is not None:
        check_port(port)
    port = port or find_free_port()
    printed: set[str] = set()
    last_lines: dict[int, str] = {}
    lock = threading.Lock()
    processes: list[RankProcess] = []
    readers: list[threading.Thread] = []
    signals = _Signals(processes)

    def begin(rank: int) -> RankProcess:
        environment = {**_environment(rank, ranks, port), **extra(rank)}
        process = (start or start_rank)([sys.executable, "-m", module, *arguments], environment)
        assert process.stderr is not None
        output = (process.stderr, rank, printed, last_lines, lock)
        readers.append(threading.Thread(target=_relay, args=output, daemon=True))
        readers[-1].start()
        return process

    def begin_again(rank: int) -> None:
        processes[rank] = begin(rank)
        if signals.first:  # the other ranks have received it already
            processes[rank].send_signal(signal.SIGTERM)

    try:
        processes.extend(map(begin, range(ranks)))
        signals.all_started()
        failed, when = _watch(processes, seconds, begin_again)
        for reader in readers:
            reader.join(timeout=5)
    finally:
        signals.restore()
        _stop(processes)
    return Ended(failed, signals.first, last_lines, when)


def start_rank(command: Sequence[str], environment: Mapping[str, str]) -> RankProcess:
    """Starts the process of a rank; the launcher reads its standard error."""
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def report_end(ended: Ended) -> int:
    """Prints what went wrong, and returns the exit status."""
    if ended.failed is None:
        return 0
    _, status = ended.failed
    number = ended.number
    if ended.is_stopped:
        # Ctrl-C in a terminal reaches ranks as SIGTERM, too
        return 128 + signal.SIGINT if number == signal.SIGINT else status
    if number == signal.SIGINT and status == -signal.SIGTERM:  # ranks had nothing to save yet
        raise KeyboardInterrupt
    print(f"freescale: {ended.describe()}; the run has ended on all ranks", file=sys.stderr)
    return 128 + number if number and status in (-number, -signal.SIGTERM) else 1


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    threads = str(count_cores(ranks))
    joined = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHER: str(os.getpid()),
    }
    # Ranks that each use all cores slow each other down. The user's own value takes precedence.
    return {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo", **os.environ, **joined}


def _relay(
    stream: IO[str], rank: int, printed: set[str], last_lines: dict[int, str], lock: threading.Lock
) -> None:
    """Relays a rank's standard error; an error that all ranks report is printed once."""
    for line in stream:
        with lock:
            if line.strip():
                last_lines[rank] = line.strip()
            if line.startswith("freescale: ") and line in printed:
                continue
            printed.add(line)
            sys.stderr.write(line if line.startswith("freescale: ") else f"[rank {rank}] {line}")
            sys.stderr.flush()


def _watch(
    processes: Sequence[RankProcess], seconds: float | None, begin_again: Callable[[int], None]
) -> tuple[tuple[int, int] | None, float]:
    """Waits for all ranks and returns (rank, status) of the failure, if any, and its time.

    After a failure the other ranks get a grace period, a short one on GPU machines if a signal
    killed the rank. Then they are stopped. If a signal killed a rank, that is reported as the
    cause, even if other ranks failed first. A rank whose GPU is busy is started again while the
    others wait at the rendezvous.
    """
    failed_at, when, ending = None, 0.0, False
    failures: list[tuple[int, int]] = []
    begun = time.monotonic()
    end = begun + seconds if seconds is not None else None
    while True:
        ended = {rank: process.poll() for rank, process in enumerate(processes)}
        if not failures and time.monotonic() < begun + _BUSY:
            for rank in [rank for rank, status in ended.items() if status == GpuBusy.exit_status]:
                begin_again(rank)
                ended[rank] = None
        if not ending:  # later exits are consequences
            failures = [(rank, status) for rank, status in ended.items() if status]
        if failures and failed_at is None:
            failed_at, when = time.monotonic(), time.time()
        since = time.monotonic() - failed_at if failed_at is not None else 0.0
        if None not in ended.values() or since > _GRACE:
            _stop(processes)
            order = sorted(failures, key=lambda failure: (failure[1] >= 0, _is_stop(failure[1])))
            return (order[0] if order else None), when
        stops = any(_is_stop(status) for _, status in failures)
        dead = any(_is_killed(status) for _, status in failures)
        grace = _KILL_GRACE if dead and _GPUS.exists() else _NOTICE
        if since > grace and not ending and not stops:
            ending = True
            _send(processes, signal.SIGKILL if dead else signal.SIGTERM)
        if end is not None and time.monotonic() > end:
            running = [rank for rank, status in ended.items() if status is None]
            raise TimeoutError(
                f"the run exceeded its limit of {seconds:.0f} s with ranks {running} still "
                "running; it was stopped"
            )
        time.sleep(0.05)


def _is_stop(status: int) -> bool:
    return status == REQUEUE or status > 128


def _is_killed(status: int) -> bool:
    """Whether a signal other than a stop request killed the rank: a crash, or the OOM killer."""
    return status < 0 and -status not in SIGNALS


def _send(processes: Sequence[RankProcess], number: int) -> None:
    for process in processes:
        process.send_signal(number)


def _stop(processes: Sequence[RankProcess]) -> None:
    _send(processes, signal.SIGTERM)
    end = time.monotonic() + 5
    for process in processes:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()


class _Signals:
    """Forwards Ctrl-C, SIGTERM and SIGUSR1 to the ranks until `restore`. The launcher itself waits:
    ranks may have to save.

    The first signal is forwarded as SIGTERM: Ctrl-C in a terminal reaches the ranks directly, and
    they would take a forwarded SIGINT for a second one, which ends them. A second signal ends the
    run at once.
    """

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._processes, self._at = processes, 0.0
        self.first = 0  # its number
        self._old: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._received) for number in SIGNALS}
            # A parent's SIG_IGN would be inherited, and the ranks' exit statuses would be lost.
            self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _received(self, number: int, _frame: object) -> None:
        if not self.first:
            self.first, self._at = number, time.monotonic()
            _send(self._processes, signal.SIGTERM)
        elif is_second(number, time.monotonic() - self._at):
            _send(self._processes, signal.SIGINT)
            raise KeyboardInterrupt

    def all_started(self) -> None:
        """Forwards a signal that arrived before all ranks were started."""
        if self.first:
            _send(self._processes, signal.SIGTERM)

    def restore(self) -> None:
        for number, previous in self._old.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
