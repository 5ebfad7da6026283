"""The storage of a rank's part of a group of sharded tables, by where its rows are at home and
whether they come and go."""

from __future__ import annotations

import torch

from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.directory import Directory
from freescale.embedding.dynamic.draws import DrawCounts
from freescale.embedding.dynamic.layout import DynamicLayout
from freescale.embedding.dynamic.storage import EXTRA_ROWS, DynamicStorage
from freescale.embedding.dynamic_rules import Dynamic
from freescale.embedding.host_tables.storage import CachedStorage
from freescale.embedding.host_tables.tiers import Tier
from freescale.embedding.layout import ShardLayout
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.storage import DeviceStorage, RowStorage, TableRange
from freescale.transport.api import Transport


def open_storage(
    layout: ShardLayout | DynamicLayout,
    optimizer: RowOptimizer,
    transport: Transport,
    tier: Tier | None,
) -> RowStorage:
    """Allocates the rows. `tier`: where they are at home, if not on the device."""
    ranges = [
        TableRange(spec, layout.base(table), *layout.get_owned_range(table, transport.rank))
        for table, spec in enumerate(layout.specs)
    ]
    size = layout.size + (EXTRA_ROWS if isinstance(layout, DynamicLayout) else 0)
    storage = ranges, size, optimizer, transport.device
    rows: RowStorage = DeviceStorage(*storage) if tier is None else CachedStorage(*storage, tier)
    if isinstance(layout, DynamicLayout):
        first, last = shards = layout.get_owned_shards(transport.rank)
        home = transport.device if tier is None else torch.device("cpu")
        draws = None
        if layout.rules.draws is not None:
            where = home if layout.rules.maps_on_device else torch.device("cpu")
            draws = DrawCounts(layout.rules, first, last, where)
        rows = DynamicStorage(rows, open_directory(layout.rules, shards, home), draws)
    return rows


def open_directory(
    rules: Dynamic, shards: tuple[int, int], home: torch.device
) -> Directory | DeviceDirectory:
    """Of the shards [first, last), whose rows are at home on a device."""
    if rules.maps_on_device and home.type != "cpu":
        return DeviceDirectory(rules, *shards, home)
    return Directory(rules, *shards)
