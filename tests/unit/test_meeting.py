"""Ranks of one attempt meet in a store where earlier attempts left their words."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from freescale.transport.api import TransportError
from freescale.transport.connect import connect, meet, warn_of_shared_store


@pytest.fixture
def address(tmp_path):
    return str(tmp_path / "store")


def open_store(address: str) -> dist.Store:
    store = dist.FileStore(address, -1)
    store.set_timeout(timedelta(seconds=120))
    return store


def meet_all(address: str, world: int, late: int = 1) -> list[bytes]:
    """What each rank reads of the others under a key that all attempts use."""
    found: dict[int, bytes] = {}
    mark = str(threading.get_ident()).encode()

    def take_part(rank: int) -> None:
        store = meet(open_store(address), rank, world, 120.0)
        store.set(f"address/{rank}", b"of this attempt, " + mark + str(late).encode())
        found[rank] = b"".join(store.get(f"address/{other}") for other in range(world))

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(world)]
    for number, thread in enumerate(threads):
        if number == late:  # rank 0 has time to answer what is left of the attempt before
            threading.Event().wait(0.1)
        thread.start()
    for thread in threads:
        thread.join(240)
    return [found[rank] for rank in range(world)]


def test_attempts_in_one_store_do_not_see_each_other(address):
    for late, world in enumerate((3, 3, 2, 4)):  # on other numbers of ranks, too
        found = meet_all(address, world, late)
        assert len(set(found)) == 1 and found[0].count(b"of this attempt") == world
        assert found[0].endswith(str(late).encode())


def test_an_attempt_that_is_not_complete_says_how_many_came(address):
    meet_all(address, 2)
    with pytest.raises(TransportError, match="1 of 2 ranks came"):
        meet(open_store(address), 0, 2, 0.2)


TORCHRUN = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}


@pytest.mark.parametrize(
    "other, warned",
    [
        ({}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),  # what the warning asks for
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        ({"LOCAL_WORLD_SIZE": "4"}, False),  # one machine
    ],
)
def test_ranks_whose_torchrun_could_not_be_replaced_are_warned(other, warned):
    found = warn_of_shared_store(TORCHRUN | other)
    assert (found is not None and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found) == warned


def test_a_store_that_is_gone_is_not_waited_for_as_other_ranks_are(monkeypatch):
    """As after the loss of torchrun's first agent, whose store the others still know."""
    waited = []

    def refuse(url, timeout):
        waited.append(timeout.total_seconds())
        raise RuntimeError("connection refused")

    monkeypatch.setattr("freescale.transport.connect.rendezvous", refuse)
    for name, value in (TORCHRUN | {"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    words = "could not join.*store does not answer.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    with pytest.raises(TransportError, match=words):
        connect("cpu", timeout=7.0)
    assert waited == [7.0]


@pytest.mark.parametrize("world, given, lazy", [(2, None, None), (32, None, "1"), (64, "0", "0")])
def test_many_ranks_connect_when_they_first_talk(world, given, lazy, monkeypatch):
    found = []

    def init(*arguments, **options):
        found.append(os.environ.get("TORCH_GLOO_LAZY_INIT"))
        raise RuntimeError("nobody is there")

    told = {"RANK": "1", "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(TransportError, match="nobody is there"):
        connect("cpu")
    assert found == [lazy]
