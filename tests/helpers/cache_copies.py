"""Copies between a home and a cache, against indexing."""

from __future__ import annotations

import torch

from freescale.embedding.host_tables.copies import Copies, Moved


def check_copies(copies: Copies, shape: tuple[int, ...], device: str) -> None:
    """Both ways at once, of rows with state of another shape: more pieces than buffers, none, and
    one."""
    random = torch.Generator().manual_seed(0)
    homes = [torch.randn(1000, *shape), torch.randn(1000)]
    caches = [torch.randn(600, *shape, device=device), torch.randn(600, device=device)]
    for tensor in (*homes, *caches):  # bits that are no number keep their payload
        tensor[::7] = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    for down, up in ((0, 0), (1, 1), (9, 0), (0, 9), (300, 280), (40, 300), (300, 7)):
        rows, slots = (torch.randperm(size, generator=random) for size in (1000, 600))
        # as in a cache: what is brought takes the place of what leaves, as far as that goes
        leave = Moved(rows[:down].to(device), slots[:down].to(device))
        bring = Moved(rows[down : down + up].to(device), slots[:up].to(device))
        expected = [home.clone() for home in homes]
        wanted = [cache.cpu().clone() for cache in caches]
        for home, cache in zip(expected, wanted, strict=True):
            home[leave.rows.cpu()] = cache[leave.slots.cpu()]
            cache[bring.slots.cpu()] = home[bring.rows.cpu()]
        copies.move(list(zip(homes, caches, strict=True)), leave, bring)
        copies.wait()
        found = [*homes, *(cache.cpu() for cache in caches)]
        for own, other in zip(found, [*expected, *wanted], strict=True):
            assert torch.equal(own.view(torch.int32), other.view(torch.int32))  # NaNs, too
