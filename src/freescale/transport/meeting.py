"""Where the ranks of an attempt meet, in a store that outlives attempts.

torchrun's agents keep one key-value store for all attempts at a run, and after a restart the
addresses of ranks that are gone are still in it. Ranks of one attempt therefore agree on a name
that no other attempt has, and keep their keys under it.

    rank 0                                  other ranks
    takes the next number                   hello/RANK = a word that nobody used before
    answers every hello it finds    ->      welcome/WORD = the attempt's name
    waits until all have joined     <-      joined + 1

A hello of an earlier attempt may be answered, too: nobody reads it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from freescale.transport.api import TransportError

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torchrun's: ranks make a store of their own
_LOOK = 0.02  # seconds between two looks for ranks that have come


def shares_store(environment: Mapping[str, str]) -> bool:
    """Whether torchrun's agent keeps the store where the ranks meet."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def warn_of_shared_store(environment: Mapping[str, str]) -> str | None:
    """What ranks over several machines that torchrun starts again should know. None: nothing.

    torchrun's first agent says only once where its store is. An agent that comes later, because its
    machine was lost, waits for word of it; if the first one itself was replaced, the others send
    their ranks to the store that is gone.
    """
    several = int(environment["WORLD_SIZE"]) > int(environment.get("LOCAL_WORLD_SIZE", "1"))
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    set_already = environment.get(_OWN_STORE) == "1"  # the static rendezvous ignores it
    if set_already or not (shares_store(environment) and several and restarts):
        return None
    return (
        "a machine whose torchrun is started again cannot join the others of a c10d rendezvous, "
        f"whose store they share: set {_OWN_STORE}=1 where torchrun starts, on all machines"
    )


def meet(store: Store, rank: int, world: int, seconds: float) -> Store:
    """Waits for all ranks of this attempt, for so many seconds at most. A collective. The store is
    one that all ranks share, with whatever earlier attempts left in it. Returns it with keys of
    this attempt alone. TransportError if not all ranks have come."""
    rooms = PrefixStore("freescale", store)
    if rank != 0:
        word = secrets.token_hex(8)
        rooms.set(f"hello/{rank}", word)
        rooms.wait([f"welcome/{word}"], timedelta(seconds=seconds))
        name = rooms.get(f"welcome/{word}").decode()
        rooms.add(f"{name}/joined", 1)
        return PrefixStore(name, rooms)
    name = f"attempt-{rooms.add('attempts', 1)}"
    answered: dict[int, str] = {}
    end = time.monotonic() + seconds
    while (joined := rooms.add(f"{name}/joined", 0)) < world - 1:
        if time.monotonic() > end:
            raise TransportError(
                f"rank 0 waited {seconds:.0f} s for the others: {joined + 1} of {world} ranks came"
            )
        for other in range(1, world):
            if rooms.check([f"hello/{other}"]):
                word = rooms.get(f"hello/{other}").decode()
                if answered.get(other) != word:
                    answered[other] = word
                    rooms.set(f"welcome/{word}", name)
        time.sleep(_LOOK)
    return PrefixStore(name, rooms)
