"""The rank that gives no sign of life is named by all others, also by those who look later."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from helpers.command import wait_for

from freescale.transport import signs_of_life
from freescale.transport.api import TransportError
from freescale.transport.local import LocalTransport
from freescale.transport.signs_of_life import SignsOfLife, choose_limit, name_silent_ranks


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(signs_of_life, "PERIOD", 0.5)
    monkeypatch.setattr(signs_of_life, "_ANSWER", 4.0)
    store = dist.FileStore(str(tmp_path / "store"), -1)
    made = [SignsOfLife(store, rank, 4, host=0) for rank in range(4)]
    wait_for(lambda: store.check([f"signs/{rank}" for rank in range(4)]))
    yield made
    for one in made:
        one.close()


def test_all_others_name_the_silent_rank(ranks):
    ranks[2].close()  # as a process that is stopped
    threading.Event().wait(0.5)
    found: dict[int, list[int]] = {}

    def look(rank: int) -> None:
        found[rank] = ranks[rank].find_silent()

    threads = [threading.Thread(target=look, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Those who named it end, and are silent themselves; who looks then hears of the first.
    ranks[0].close()
    ranks[1].close()
    look(3)
    assert found == {0: [2], 1: [2], 3: [2]}


def test_nobody_is_named_while_all_are_alive(ranks):
    assert ranks[0].find_silent() == []


def test_a_store_that_does_not_answer_is_its_ranks_silence(ranks, monkeypatch):
    monkeypatch.setattr(signs_of_life, "_ANSWER", 0.1)
    monkeypatch.setattr(ranks[1], "_look", lambda: threading.Event().wait(20))
    assert ranks[1].find_silent() == [0]


def test_errors_of_the_transport_name_it_and_others_stay(ranks):
    transport = LocalTransport()
    transport.signs = ranks[1]
    ranks[1]._silent = [2]
    named = pytest.raises(TransportError, match="time is up; no sign of life from rank 2")
    with named, name_silent_ranks(transport):
        raise TransportError("time is up")
    with pytest.raises(RuntimeError, match="^out of memory$"), name_silent_ranks(transport):
        raise RuntimeError("out of memory")
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed"
    with pytest.raises(TransportError, match="no sign of life"), name_silent_ranks(transport):
        raise RuntimeError(gloo)


@pytest.mark.parametrize("world", [2, 64, 4096])
@pytest.mark.parametrize("timeout", [3.0, 30.0, 120.0])
def test_a_collective_fails_early_enough_to_name_who_is_silent(timeout, world):
    limit = choose_limit(timeout, world)
    looks = 3 * max(0.5, world / 2000)
    assert limit + looks < timeout or limit == 0.75 * timeout
    assert 0.75 * timeout <= limit < timeout
