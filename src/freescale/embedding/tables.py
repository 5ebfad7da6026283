"""All tables of a model: placed once, then requested, fetched, read and updated step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.config import TrainConfig
from freescale.embedding.exchange import Sharded
from freescale.embedding.host_tables.tiers import Host, Tier
from freescale.embedding.layout import ShardLayout, TableSpec, find_feature_ids
from freescale.embedding.lease import TableLease
from freescale.embedding.local import Collected, LocalGroup, LocalRequest
from freescale.embedding.memory import check_memory, find_room, list_memory
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.placement import (
    Placement,
    Wanted,
    choose_placement,
    count_state_bytes,
    move_to_host,
    parse_placement,
)
from freescale.embedding.replicated import Replicated
from freescale.embedding.request import Request
from freescale.embedding.storage import Recorder
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import failing_together


class Tables:
    """All tables of a model on this rank. `parallelize` makes it; `place`, once and before step 1,
    allocates the rows."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        optimizers: Mapping[str, RowOptimizer],
        transport: Transport,
        *,
        placement: Wanted | Mapping[str, Wanted] = TrainConfig.placement,
        seed: int = TrainConfig.seed,
        std: Mapping[str, float],
        weights: Mapping[str, Tensor] | None = None,
        row_clip: float | None = TrainConfig.row_clip,
        wire: torch.dtype | None = None,
    ) -> None:
        if row_clip is not None and not row_clip > 0:
            raise ValueError(f"row_clip must be positive, got {row_clip}")
        self.specs = {spec.name: spec for spec in specs}
        self.optimizers = dict(optimizers)
        self.transport = transport
        self.row_clip = row_clip
        self._wire = wire
        self.placements: dict[str, Placement] = {}
        self.groups: list[Sharded | Replicated] = []
        self._wanted = parse_placement(placement, list(self.specs))
        for name, wanted in self._wanted.items():
            if wanted.kind == "replicated" and self.specs[name].dynamic is not None:
                raise ValueError(f"table {name!r} is dynamic, which a replicated table cannot be")
        self._seed, self.init_std, self._weights = seed, dict(std), dict(weights or {})
        self._where: dict[str, tuple[int, int]] = {}  # table -> (group, table within the group)
        # groups and their requests, while the model can read them
        self._open: list[tuple[Any, Any]] | None = None
        self.lease = TableLease(self.groups)

    @property
    def placed(self) -> bool:
        return bool(self.placements)

    @property
    def cached(self) -> bool:
        """Whether the host decides where rows of a table are: at home elsewhere than on the device,
        or coming and going."""
        tiers = any(placed.tier is not None for placed in self.placements.values())
        return tiers or any(spec.dynamic is not None for spec in self.specs.values())

    # ---- before step 1

    def place(
        self, batch: SequenceBatch | None = None, recorded: Mapping[str, str] | None = None
    ) -> None:
        """Decides where each table lives and allocates it. A collective.

        Args:
            batch: this rank's first batch; None if nobody has looked at the data.
            recorded: placement of each table in an earlier run, which is kept.

        Raises:
            ValueError: the tables do not fit into the memory of a machine.
        """
        assert not self.placed, "tables are placed once"
        rows_read = self._count_rows_read(batch)
        for name, spec in self.specs.items():
            if spec.dynamic is not None and name not in self._wanted:
                self.placements[name] = Placement("sharded", "dynamic")
            elif name in self._wanted:
                self.placements[name] = self._wanted[name]
            elif recorded and name in recorded:
                self.placements[name] = Placement(recorded[name], "as in the checkpoint")
            else:
                self.placements[name] = choose_placement(
                    spec, count_state_bytes(self.optimizers[spec.name], spec), rows_read.get(name)
                )
        self._fit_memory()
        with failing_together(self.transport):
            self._make_groups()
        self._weights.clear()

    def _make_groups(self) -> None:
        """Allocates the rows and gives them their first values."""
        Key = tuple[str, Tier | None, int, torch.dtype, RowOptimizer, str | None]
        grouped: dict[Key, list[TableSpec]] = {}
        for name, spec in self.specs.items():
            placed = self.placements[name]
            alone = name if spec.dynamic is not None else None
            key = (placed.kind, placed.tier, spec.width, spec.dtype, self.optimizers[name], alone)
            grouped.setdefault(key, []).append(spec)
        for (kind, tier, _, _, optimizer, _), specs in grouped.items():
            group = (
                Sharded(specs, optimizer, self.transport, self._wire, tier)
                if kind == "sharded"
                else Replicated(specs, optimizer, self.transport)
            )
            self._where |= {
                spec.name: (len(self.groups), table) for table, spec in enumerate(specs)
            }
            self.groups.append(group)
        for name in self.specs:
            rows = self.get_group(name).rows
            if name in self._weights:
                rows.copy_from(name, self._weights[name])
            else:
                rows.initialise(name, self._seed, self.init_std[name])

    def _count_rows_read(self, batch: SequenceBatch | None) -> dict[str, float]:
        """How many distinct rows of each table a rank reads, mean over ranks that have a batch."""
        mine: dict[str, int] = {}
        if batch is not None and len(batch):
            for name, spec in self.specs.items():
                parts = [ids.reshape(-1) for _, ids in find_feature_ids(batch, spec)]
                mine[name] = torch.unique(torch.cat(parts)).numel()
        seen = [counts for counts in gather_json(self.transport, mine) if counts]
        return (
            {name: sum(counts[name] for counts in seen) / len(seen) for name in self.specs}
            if seen
            else {}
        )

    def _fit_memory(self) -> None:
        """Moves tables that do not fit onto the GPUs into host memory, and refuses what does not
        fit there either. A collective."""
        ranks, sizes = list_memory(self.transport), {}
        for name, spec in self.specs.items():
            parts = self.transport.world if self.placements[name].kind == "sharded" else 1
            each = spec.bytes_per_row + count_state_bytes(self.optimizers[name], spec)
            sizes[name] = ShardLayout((spec,), parts).size * each
            if spec.dynamic is not None and spec.dynamic.maps_on_device:
                sizes[name] += spec.dynamic.map_bytes // parts
        if self.transport.device.type == "cuda":
            caches = {n: min(sizes[n], p.tier.cache_bytes) for n, p in self._list_tiers()}
            self.placements = move_to_host(
                self.placements, sizes | caches, find_room(ranks), self._wanted
            )
        homes = sum(sizes[n] for n, p in self._list_tiers() if isinstance(p.tier, Host))
        for name, spec in self.specs.items():
            if spec.dynamic is not None:
                homes += spec.dynamic.counter_bytes // self.transport.world
                if not spec.dynamic.maps_on_device or self.placements[name].tier is not None:
                    homes += spec.dynamic.map_bytes // self.transport.world
        for name, placed in self._list_tiers():
            sizes[name] = min(sizes[name], placed.tier.cache_bytes)
        check_memory(ranks, sum(sizes.values()), homes, self.specs.values())

    def _list_tiers(self) -> list[tuple[str, Any]]:
        """Tables whose rows are not at home on the device, with their placements."""
        return [(name, placed) for name, placed in self.placements.items() if placed.tier]

    def describe(self) -> list[str]:
        """One line per table, for the start of a run."""
        lines = []
        for name, spec in self.specs.items():
            placed = self.placements.get(name)
            where = str(placed) if placed else "not placed yet"
            size = f"{spec.rows:,} x {spec.width}, {self.optimizers[name].name}"
            if spec.dynamic is not None:
                size = f"{size}, {spec.dynamic}"
            lines.append(f"table {name}: {size}, {where}")
        return lines

    def get_group(self, name: str) -> Sharded | Replicated:
        """The group that holds a table."""
        return self.groups[self._where[name][0]]

    def pair_sharded(self, requests: Sequence[Request]) -> list[tuple[Sharded, Request]]:
        """The sharded groups, each with its request out of one per group."""
        pairs = zip(self.groups, requests, strict=True)
        return [(group, request) for group, request in pairs if isinstance(group, Sharded)]

    def pair_replicated(self, requests: Sequence[Request]) -> list[tuple[Replicated, Request]]:
        """The replicated groups, each with its request out of one per group."""
        pairs = zip(self.groups, requests, strict=True)
        return [(group, request) for group, request in pairs if isinstance(group, Replicated)]

    # ---- every step

    def check(self, batch: SequenceBatch, *, strict: bool = True) -> None:
        """Refuses ids that no table row has. Reads the ids: call it while the batch is on the host.

        Args:
            batch: on the host.
            strict: whether the batch must have all features that the tables read.

        Raises:
            ValueError: an id is not an integer, or no row of its table.
        """
        for name, spec in self.specs.items():
            for feature, ids in find_feature_ids(batch, spec, strict=strict):
                if ids.dtype not in (torch.int64, torch.int32):
                    raise ValueError(
                        f"feature {feature!r} holds {ids.dtype}; table {name!r} is "
                        "read by integer ids"
                    )
                if not ids.numel() or spec.dynamic is not None:
                    continue
                low, high = batch.find_bounds(ids)
                if low < 0 or high >= spec.rows:
                    bad = low if low < 0 else high
                    raise ValueError(
                        f"feature {feature!r} holds id {bad}, but table {name!r} has "
                        f"rows 0 to {spec.rows - 1}"
                    )

    def request(
        self, batches: Sequence[SequenceBatch], transport: Transport | None = None
    ) -> list[Request]:
        """Deduplicates the ids of some (micro-)batches and sends them to the owners of their rows.
        Returns a request for each group. A collective, over `transport` if it is given."""
        return [group.request(batches, transport or self.transport) for group in self.groups]

    def fetch(self, requests: list[Request], train: bool = True) -> None:
        """Brings the requested rows here; from now on the model can read them. A collective."""
        for group, request in zip(self.groups, requests, strict=True):
            group.fetch(request, self.transport, train)
        self.open(requests, train)

    def apply(self, requests: list[Request], *, step: int, factor: float = 1.0) -> None:
        """Sends the gradients to the owners and updates the rows. A collective."""
        self._open = None
        for group, request in zip(self.groups, requests, strict=True):
            group.apply(request, self.transport, step=step, factor=factor, clip=self.row_clip)

    def request_locally(self, batches: Sequence[SequenceBatch]) -> list[LocalRequest | Request]:
        """For one rank: the rows that some (micro-)batches read, which the model can read from now
        on where they are."""
        requests = self.prepare_locally(batches, self.transport.ledger)
        self.open_locally(requests)
        return requests

    def prepare_locally(
        self, batches: Sequence[SequenceBatch], ledger: Recorder
    ) -> list[LocalRequest | Request]:
        """For one rank: the rows that some (micro-)batches read become resident. On the caller's
        thread and stream."""
        return [group.prepare(batches, ledger) for group in self.local_groups]

    def open_locally(self, requests: Sequence[LocalRequest | Request]) -> None:
        """For one rank: the model can read what was prepared from now on."""
        for group, request in zip(self.local_groups, requests, strict=True):
            group.rows.begin(self.transport.ledger)
            group.open(request)
        self._open = list(zip(self.local_groups, requests, strict=True))

    def collect_locally(self, requests: Sequence[LocalRequest | Request]) -> list[Collected]:
        """For one rank: the gradients of what has read the rows of `request_locally`."""
        self._open = None
        return [
            group.collect(request)
            for group, request in zip(self.local_groups, requests, strict=True)
        ]

    def update_locally(
        self, collected: Sequence[Collected], *, step: int, factor: float = 1.0
    ) -> None:
        """For one rank: updates the rows by what `collect_locally` found."""
        for group, found in zip(self.local_groups, collected, strict=True):
            group.update(found, step=step, factor=factor, clip=self.row_clip)

    @cached_property
    def local_groups(self) -> list[LocalGroup]:
        """The groups of a single rank, once they are placed."""
        assert self.placed and self.transport.world == 1
        return [
            LocalGroup(group.layout, group.rows, self._wire if isinstance(group, Sharded) else None)
            for group in self.groups
        ]

    def open(self, requests: list[Request], train: bool = True) -> None:
        """From now on the model can read these rows, which are here; with `train`, their step
        begins."""
        for group in self.groups if train else ():
            group.rows.begin(self.transport.ledger)
        self._open = list(zip(self.groups, requests, strict=True))

    def release(self) -> None:
        """Forgets the fetched rows without an update (evaluation)."""
        self._open = None

    def count_collisions(self, requests: list[Request]) -> tuple[int, Tensor | int]:
        """Over all groups: (requests at this owner, those whose row the last step read too)."""
        pairs = [
            group.count_collisions(request)
            for group, request in zip(self.groups, requests, strict=True)
        ]
        return sum(total for total, _ in pairs), sum(hit for _, hit in pairs)

    def read(self, name: str, ids: Tensor) -> Tensor:
        """What nn.Embedding would return: rows [..., width] of ids [...], out of the rows that were
        fetched."""
        (request, part, index), padding = self._locate(name, ids), self.specs[name].padding
        result: Tensor = request.read(part, index)
        if padding is not None:
            result = torch.where((ids == padding)[..., None], result.detach(), result)
        return result

    def locate(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows [u, width], index [...]): all rows of the table's group that were fetched, and
        where among them those of ids [...] are."""
        request, part, index = self._locate(name, ids)
        rows, index = request.offer(part, index)
        return rows, index

    def find_log_q(self, name: str, ids: Tensor) -> Tensor | None:
        """[...]: the log of the probability that a draw from the batch is each of ids [...], but
        for a constant; None where the table does not count draws, or nothing is trained."""
        if self._open is None or self.specs[name].dynamic is None:
            return None
        group, table = self._where[name]
        reader, request = self._open[group]
        if request.log_q is None:
            return None
        found: Tensor = reader.find_log_q(request, table, ids)
        return found

    def _locate(self, name: str, ids: Tensor) -> tuple[Any, int | None, Tensor]:
        """The request that has the rows of ids [...], and what its methods take for them."""
        if self._open is None:
            raise RuntimeError(
                f"table {name!r} is read outside a step: use freescale.evaluate(sharded, batches), "
                "or call the model inside `with sharded.reading(batch) as batch:`"
            )
        spec = self.specs[name]
        group, table = self._where[name]
        reader, request = self._open[group]
        part, index, found = reader.locate(request, table, ids)
        if found is not None and ids.numel() and spec.dynamic is None:
            found = found & (ids >= 0) & (ids < spec.rows)
        if found is not None and ids.numel() and not bool(found.all()):
            missing = int(ids[~found].reshape(-1)[0])
            raise ValueError(
                f"module {name!r} was asked for id {missing}, which none of its announced features "
                f"({', '.join(spec.features)}) holds: add the feature to `ids` of parallelize"
            )
        return request, part, index

    # ---- for checkpoints, export and evaluation

    def get_local_state(self, name: str) -> dict[str, Tensor]:
        """Views of this rank's part of a table: `rows` and the state of its optimizer, in spread
        order. On the host where the rows are at home there. Whoever writes to them calls
        `reload`."""
        return self.get_group(name).rows.get_tensors(name)

    def reload(self) -> None:
        """The tensors of `get_local_state` were written to: steps read what they hold now. Lanes
        must be quiet, as after `discard`."""
        for group in self.groups:
            group.rows.reload()

    def get_local_rows(self, name: str) -> tuple[Tensor, Tensor]:
        """(ids [n], rows [n, width]): this rank's part of a table. The parts of all ranks make up
        the table, each row once."""
        rows = self.get_group(name).rows
        ids, weight = rows.list_rows(name)
        if self.placements[name].kind == "sharded":
            return ids, weight
        first, last = ShardLayout((self.specs[name],), self.transport.world).get_owned_range(
            0, self.transport.rank
        )
        return ids[first:last], weight[first:last]
