"""Host and disk tables on several ranks: the bits of tables on the device, staged and serial. Three
consecutive batches read 120 rows, which are spread over the ranks; caches hold few more."""

from __future__ import annotations

import pytest
import torch
from helpers.collisions import colliding, train
from helpers.ranks import run_ranks

from freescale.embedding.host_tables.tiers import Disk, Host


def _returning(step):
    """Ids that come back after five batches."""
    return [(i * 7 + 40 * (step % 5)) % 200 for i in range(40)]


STREAMS = [colliding(0.3, steps=12), [_returning(step) for step in range(12)]]


def _differences(transport, folder):
    found, cache = {}, 8 * 8 * 3 * (140 // transport.world + 10)
    for number, stream in enumerate(STREAMS):
        losses, expected = train(transport, "serial", stream, optimizer="adam")
        for schedule, tier in (
            ("serial", Host(cache)),
            ("staged", Host(cache)),
            ("staged", Disk(folder, cache)),
        ):
            placement = {"item": tier, "action": "sharded"}
            own_losses, own = train(
                transport, schedule, stream, optimizer="adam", placement=placement
            )
            different = [
                name for name, value in expected.items() if not torch.equal(own[name], value)
            ]
            found[number, schedule, str(tier)] = different + ["losses"] * (losses != own_losses)
    return found


def test_bit_equal_to_tables_on_the_device(tmp_path):
    for found in run_ranks(3, _differences, str(tmp_path)):
        assert len(found) == 6 and found == dict.fromkeys(found, [])


def _too_small(transport):
    """The words of both schedules. Caches of 27 rows: two of the ranks need no more."""
    found = []
    for schedule in ("staged", "serial"):
        placement = {"item": Host(128 * 27), "action": "sharded"}
        with pytest.raises(ValueError) as error:
            train(transport, schedule, STREAMS[1], placement=placement)
        found.append(str(error.value))
    return found


def test_a_cache_too_small_on_some_ranks_ends_all_with_the_same_words():
    (staged, serial), *others = run_ranks(3, _too_small)
    assert staged == serial and all(words == [staged, serial] for words in others)
    assert staged == (
        "rank 2: table 'item': the cache holds 27 rows of this rank (3.5 kB), 3 consecutive "
        "batches read 28 rows: give it at least 3.6 kB, or use smaller batches or more ranks"
    )
