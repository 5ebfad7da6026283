"""Names the rank that has fallen silent.

When a collective fails, a rank seldom knows which rank is to blame: it may have waited for a rank
that waited for another. So every rank writes a sign of life to the store twice a second. After a
failure ranks look twice, and those without a new sign are named. Clocks are not compared, and
nothing is read while all goes well.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from freescale.transport.api import Transport, TransportError

PERIOD = 0.5  # seconds between two signs of a rank
_RANKS_A_SECOND = 2000  # more ranks give fewer signs, for the store's sake
_MISSED = 3.0  # periods between the two looks
_ANSWER = 1.0  # seconds that the store has to answer
_MOST_FOR_NAMING = 0.25  # of --timeout
_FOUND = "silent"  # key of what the first rank that looked found
_LOOKED = "looked"  # key of how many have looked


def choose_limit(timeout: float, world: int) -> float:
    """Seconds after which a collective fails, so that when `timeout` is over the rank that fell
    silent has been named. A short timeout keeps most of its time for the collective."""
    naming = _MISSED * _choose_period(world) + _ANSWER
    return timeout - min(naming, _MOST_FOR_NAMING * timeout)


def _choose_period(world: int) -> float:
    return max(PERIOD, world / _RANKS_A_SECOND)


class SignsOfLife:
    """Gives this rank's signs, and finds ranks that give none."""

    def __init__(self, store: Store, rank: int, world: int, host: int | None) -> None:
        """Starts to give signs, over connections to the store of its own. `host`: the rank in whose
        process the store is; None: in none of them."""
        self._rank, self._world, self._host = rank, world, host
        self._period = _choose_period(world)
        own: Any = PrefixStore("signs", store)
        self._store: Any = own.clone()
        self._ended, self._found = threading.Event(), threading.Lock()
        self._silent: list[int] | None = None
        threading.Thread(target=self._give, name="freescale-signs", daemon=True).start()

    def find_silent(self) -> list[int]:
        """Ranks that give no sign of life. Takes some seconds; a later call returns the same."""
        with self._found:
            if self._silent is None:
                self._silent = self._look_in_time()
            return self._silent

    def close(self) -> None:
        self._ended.set()

    def _give(self) -> None:
        """In the thread, until the process ends or the store is gone."""
        count = 0
        with suppress(RuntimeError):
            store = self._store.clone()  # what looks must not wait for what gives
            while not self._ended.is_set():
                count += 1
                store.set(str(self._rank), str(count))
                self._ended.wait(self._period)

    def _look_in_time(self) -> list[int]:
        """A store that does not answer is silent with the rank that has it."""
        found: list[list[int]] = []

        def look() -> None:
            with suppress(RuntimeError):
                found.append(self._look())
                self._leave(found[0])

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(_ANSWER + _MISSED * self._period)
        if found:
            return found[0]
        return [self._host] if self._host not in (None, self._rank) else []

    def _look(self) -> list[int]:
        known = self._read_found()
        if known is not None:
            return known
        others = [rank for rank in range(self._world) if rank != self._rank]
        before = self._read(others)
        threading.Event().wait(_MISSED * self._period)
        known = self._read_found()  # the first look is the most reliable
        if known is not None:
            return known
        silent = [rank for rank, sign in self._read(others).items() if sign == before[rank]]
        if silent:
            self._store.set(_FOUND, json.dumps(silent))
        return silent

    def _leave(self, silent: list[int]) -> None:
        """The store ends with its rank, which therefore waits until the others have looked."""
        looked = int(self._store.add(_LOOKED, 1))
        while self._rank == self._host and looked < self._world - len(silent):
            threading.Event().wait(self._period / 10)
            looked = int(self._store.add(_LOOKED, 0))

    def _read_found(self) -> list[int] | None:
        if not self._store.check([_FOUND]):
            return None
        found: list[int] = json.loads(self._store.get(_FOUND))
        return [rank for rank in found if rank != self._rank]

    def _read(self, ranks: list[int]) -> dict[int, bytes]:
        keys = [str(rank) for rank in ranks]
        if self._store.has_extended_api() and self._store.check(keys):
            return dict(zip(ranks, self._store.multi_get(keys), strict=True))
        return {
            rank: self._store.get(key) if self._store.check([key]) else b""
            for rank, key in zip(ranks, keys, strict=True)
        }


@contextmanager
def name_silent_ranks(transport: Transport) -> Iterator[None]:
    """Around work of all ranks: an error of the transport says which ranks give no sign of life."""
    try:
        yield
    except RuntimeError as error:
        signs = getattr(transport, "signs", None)
        if signs is None or not _is_of_transport(error):
            raise
        silent = signs.find_silent()
        message = " ".join(f"{error}".split())[:400]
        if not isinstance(error, TransportError):
            message = f"an exchange failed: a rank died or fell silent ({message})"
        if silent:
            named = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
            message += f"; no sign of life from rank{'s' * (len(silent) > 1)} {named}"
        raise TransportError(message) from error


def _is_of_transport(error: RuntimeError) -> bool:
    """Also of torch's own collectives, as its checkpoints use them."""
    return isinstance(error, (TransportError, DistError)) or "gloo/transport" in str(error)
