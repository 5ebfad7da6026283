"""Opens the storage of a rank's part of sharded tables: where their rows are at home."""

from __future__ import annotations

import torch

from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.directory import Directory
from freescale.embedding.dynamic.draws import DrawCounts
from freescale.embedding.dynamic_rules import Dynamic
from freescale.embedding.host_tables.tiers import Tier
from freescale.embedding.layout import DynamicLayout, Layout
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.storage.api import Storage, TableRange
from freescale.embedding.storage.cached import CachedStorage
from freescale.embedding.storage.device import DeviceStorage
from freescale.embedding.storage.dynamic import EXTRA_ROWS, DynamicStorage
from freescale.kernels.dispatch.versions import runs_triton
from freescale.transport.api import Transport


def open_storage(
    layout: Layout, optimizer: RowOptimizer, transport: Transport, tier: Tier | None
) -> Storage:
    """Allocates this rank's rows of a group, and the directory of a dynamic table's ids. `tier`:
    the home of the rows, if not the device."""
    size = layout.size + (EXTRA_ROWS if isinstance(layout, DynamicLayout) else 0)
    ranges = [
        TableRange(spec, layout.base(table), *layout.get_owned_range(table, transport.rank))
        for table, spec in enumerate(layout.specs)
    ]
    rows: Storage = (
        DeviceStorage(ranges, size, optimizer, transport.device)
        if tier is None
        else CachedStorage(ranges, size, optimizer, transport.device, tier)
    )
    if not isinstance(layout, DynamicLayout):
        return rows
    first, last = shards = layout.get_owned_shards(transport.rank)
    home = transport.device if tier is None else torch.device("cpu")
    directory, draws = open_directory(layout.rules, shards, home), None
    if layout.rules.draws is not None:
        where = home if isinstance(directory, DeviceDirectory) else torch.device("cpu")
        draws = DrawCounts(layout.rules, first, last, where)
    return DynamicStorage(rows, directory, draws)


def open_directory(
    rules: Dynamic, shards: tuple[int, int], home: torch.device
) -> Directory | DeviceDirectory:
    """The directory of the shards [first, last), whose rows are at home on a device."""
    if rules.maps_on_device and runs_triton(home):
        return DeviceDirectory(rules, *shards, home)
    return Directory(rules, *shards)
