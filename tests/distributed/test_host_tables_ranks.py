"""Host and disk tables on several ranks: the bits of tables on the device, staged and serial. Three
consecutive batches read 120 rows, which are spread over the ranks; caches hold few more."""

from __future__ import annotations

import torch
from helpers.collisions import colliding, train
from helpers.ranks import gather_ranks, run_ranks

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
    train(transport, "staged", STREAMS[1], placement={"item": Host(128 * 20), "action": "sharded"})


def test_a_cache_too_small_ends_all_ranks():
    errors = [error for error, _ in gather_ranks(2, _too_small, timeout=60)]
    assert all(errors)
    assert any("consecutive batches read" in e and "give it at least" in e for e in errors)
