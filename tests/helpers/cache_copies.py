"""Copies between a home and a cache, against indexing."""

from __future__ import annotations

import numpy as np
import torch

from freescale.embedding.host_tables.copies import Copies, Moved


def check_copies(copies: Copies, shape: tuple[int, ...], device: str) -> None:
    """Both ways at once, of rows with state of another shape: more pieces than buffers, none, and
    one."""
    random = np.random.default_rng(0)
    homes = [torch.randn(1000, *shape), torch.randn(1000)]
    caches = [torch.randn(600, *shape, device=device), torch.randn(600, device=device)]
    for tensor in (*homes, *caches):  # bits that are no number keep their payload
        tensor[::7] = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    for down, up in ((0, 0), (1, 1), (9, 0), (0, 9), (300, 280), (40, 300), (300, 7)):
        rows, slots = random.permutation(1000), random.permutation(600)[:down]
        leave = Moved(rows[:down], slots)
        # as in a cache: what is brought takes the place of what leaves, as far as that goes
        free = np.setdiff1d(np.arange(600), slots)
        bring = Moved(rows[down : down + up], np.concatenate([slots, free])[:up])
        expected = [home.clone() for home in homes]
        wanted = [cache.cpu().clone() for cache in caches]
        for home, cache in zip(expected, wanted, strict=True):
            home[leave.rows] = cache[leave.slots]
            cache[bring.slots] = home[bring.rows]
        copies.move(list(zip(homes, caches, strict=True)), leave, bring)
        found = [*homes, *(cache.cpu() for cache in caches)]
        for own, other in zip(found, [*expected, *wanted], strict=True):
            assert torch.equal(own.view(torch.int32), other.view(torch.int32))  # NaNs, too
