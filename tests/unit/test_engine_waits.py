"""What the engine sleeps for: nobody waits for a rank that has something to hand over."""

from __future__ import annotations

import platform
import threading
import time

import pytest
from helpers.engine_fuzz import NOT_READY, join_ranks, make_message

from freescale.transport.hostwire.bindings import explain_missing_engine, load_engine

EXCHANGES = 20
SLEEP = 0.1  # seconds, LONGEST_SLEEP_NS of csrc/wait.h


class AtTheThirdLook:
    """Events that are over when they are looked at for the third time."""

    def __init__(self):
        self._looks = {}

    def record(self, event, stream):
        self._looks[event] = 0
        return 0

    def query(self, event):
        self._looks[event] += 1
        return NOT_READY if self._looks[event] < 3 else 0


@pytest.mark.skipif(platform.system() != "Linux", reason="the engine is for Linux")
@pytest.mark.parametrize("alone", [set(), {0}])
def test_a_copy_that_is_over_between_two_looks_is_not_slept_through(alone):
    """Both ranks look whether a copy is over, when it is begun and when they wait, and it is when
    they look again, before they sleep. What it brought is not on its way then, and nothing else
    would wake anybody."""
    library = load_engine()
    assert library is not None, explain_missing_engine()
    ranks = join_ranks(library, 2, alone, True, [AtTheThirdLook() for _ in range(2)])
    found: list[bool] = []
    seconds: list[float] = []

    def exchange(rank):
        other = 1 - rank.rank
        for number in range(EXCHANGES):
            begin = time.monotonic()
            sent = [make_message(rank.rank, to, number, 5000) for to in range(2)]
            begun, into = rank.exchange(sent, [5000, 5000])
            failed = rank.until(begun)
            seconds.append(time.monotonic() - begin)
            came = into[other].raw[:5000]
            found.append(not failed and came == make_message(other, rank.rank, number, 5000))

    threads = [threading.Thread(target=exchange, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.close()
    assert found == [True] * (2 * EXCHANGES)
    # With sleeps, none would be as quick; without, a busy machine holds some of them up.
    assert sorted(seconds)[EXCHANGES // 2] < SLEEP / 2
