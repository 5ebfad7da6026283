"""All tables of a model: placed once, then read step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.config import TrainConfig
from freescale.embedding.layout import ShardLayout, TableSpec, find_feature_ids
from freescale.embedding.lease import TableLease
from freescale.embedding.optimizers import RowOptimizer
from freescale.embedding.placement import Placement, Wanted, parse_placement, place_tables
from freescale.embedding.rows import Rows
from freescale.embedding.table_set import TableGroup, TableSet, open_locally, open_tables
from freescale.embedding.two_level import choose_exchange, is_two_level
from freescale.transport.api import Transport
from freescale.transport.failures import failing_together


class Tables:
    """All tables of a model on this rank, which `place` allocates, once and before step 1."""

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
        exchange: str = TrainConfig.exchange,
    ) -> None:
        if row_clip is not None and not row_clip > 0:
            raise ValueError(f"row_clip must be positive, got {row_clip}")
        self.specs = {spec.name: spec for spec in specs}  # specs by name, like the optimizers
        self.optimizers = dict(optimizers)
        self.transport = transport
        self.row_clip = row_clip
        self._wire = wire
        # flat or two-level, and why; decided when the tables are placed
        self.exchange = choose_exchange(exchange, transport.machines, transport.rdma)
        self._requested_exchange = exchange
        self.placements: dict[str, Placement] = {}  # empty until the tables are placed
        self.set = TableSet(transport)  # the groups, with the verbs of a step
        self._wanted = parse_placement(placement, list(self.specs))
        for name, wanted in self._wanted.items():
            if wanted.kind == "replicated" and self.specs[name].dynamic is not None:
                raise ValueError(f"table {name!r} is dynamic, which a replicated table cannot be")
        self._seed, self.init_std, self._weights = seed, dict(std), dict(weights or {})
        # the rows of each group, while the model can read them
        self._open: Sequence[Rows] | None = None
        self.lease = TableLease()  # the schedule that trains the tables

    @property
    def placed(self) -> bool:
        return bool(self.placements)

    @property
    def cached(self) -> bool:
        """Whether the host decides where rows are: at home elsewhere, or coming and going."""
        tiers = any(placed.tier is not None for placed in self.placements.values())
        return tiers or any(spec.dynamic is not None for spec in self.specs.values())

    # ---- before step 1

    def place(
        self,
        batch: SequenceBatch | None = None,
        recorded: Mapping[str, str] | None = None,
        exchange: str | None = None,
    ) -> None:
        """Decides where each table lives and allocates it. A collective. ValueError if the tables
        do not fit into the memory of a machine, or `exchange` is not the requested one. `batch`:
        this rank's first; None if nobody has looked at the data. `recorded`: placement of each
        table in an earlier run, which is kept, and so is its `exchange`."""
        assert not self.placed, "tables are placed once"
        specs, transport = list(self.specs.values()), self.transport
        self.exchange = choose_exchange(
            self._requested_exchange, transport.machines, transport.rdma, exchange
        )
        self.placements = place_tables(
            specs, self.optimizers, self._wanted, recorded or {}, batch, self.transport
        )
        with failing_together(self.transport):
            self.set = open_tables(
                specs,
                self.optimizers,
                self.placements,
                self.transport,
                self._wire,
                self.exchange[0],
            )
            self.lease.storages = [group.rows for group in self.groups]
            for name in self.specs:
                rows = self.get_group(name).rows
                if name in self._weights:
                    rows.copy_from(name, self._weights[name])
                else:
                    rows.initialise(name, self._seed, self.init_std[name])
        self._weights.clear()

    def place_as_saved(self, placement: Mapping[str, str], exchange: str, continues: bool) -> None:
        """Places the tables as a checkpoint says, unless they are placed. A collective. ValueError
        if the run `continues` and would add gradients in another order than before."""
        if not self.placed:
            return self.place(recorded=placement, exchange=exchange)
        if not continues or exchange == self.exchange[0]:
            return
        machines = self.transport.machines
        if is_two_level(exchange, machines) != is_two_level(self.exchange[0], machines):
            raise ValueError(
                f"the checkpoint was trained with exchange {exchange!r}, which adds gradients in "
                f"another order than {self.exchange[0]!r}: pass exchange={exchange!r}"
            )
        self.exchange = exchange, "as in the checkpoint"

    @cached_property
    def local(self) -> TableSet:
        """The groups as a single rank reads them: in place."""
        assert self.placed
        return open_locally(self.set, self.transport)

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

    def get_group(self, name: str) -> TableGroup:
        """The group that holds a table."""
        return self.groups[self.set.places[name].group]

    @property
    def groups(self) -> list[TableGroup]:
        """All groups; none until the tables are placed."""
        return self.set.groups

    # ---- every step

    def check(self, batch: SequenceBatch, *, strict: bool = True) -> None:
        """Refuses ids that no table row has, with a ValueError. Reads the ids: call it while the
        batch is on the host. `strict`: the batch must have all features that the tables read."""
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

    def open(self, rows: Sequence[Rows]) -> None:
        """From now on the model can read these rows, one of each group."""
        self._open = rows

    def close(self) -> None:
        """From now on it cannot."""
        self._open = None

    def read(self, name: str, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """What nn.Embedding would return: rows [..., width] of ids [...], out of the rows that were
        fetched, in another dtype if one is given."""
        (rows, part, index), padding = self._locate(name, ids), self.specs[name].padding
        result = rows.read(part, index, dtype)
        if padding is not None:
            result = torch.where((ids == padding)[..., None], result.detach(), result)
        return result

    def locate(self, name: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows [u, width], index [...]): fetched rows of the table's group, and places of ids."""
        rows, part, index = self._locate(name, ids)
        return rows.offer(part, index)

    def find_log_q(self, name: str, ids: Tensor) -> Tensor | None:
        """[...]: the log of the probability that a draw from the batch is each of ids [...], but
        for a constant; None where the table does not count draws, or nothing is trained."""
        if self._open is None:
            return None
        group, table = self.set.places[name]
        return self._open[group].find_log_q(table, ids)

    def _locate(self, name: str, ids: Tensor) -> tuple[Rows, int | None, Tensor]:
        """The rows of ids [...], and what their methods take for them."""
        if self._open is None:
            raise RuntimeError(
                f"table {name!r} is read outside a step: use freescale.evaluate(sharded, batches), "
                "or call the model inside `with sharded.reading(batch) as batch:`"
            )
        spec = self.specs[name]
        group, table = self.set.places[name]
        rows = self._open[group]
        part, index, found = rows.locate(table, ids)
        if found is not None and ids.numel() and spec.dynamic is None:
            found = found & (ids >= 0) & (ids < spec.rows)
        if found is not None and ids.numel() and not bool(found.all()):
            missing = int(ids[~found].reshape(-1)[0])
            raise ValueError(
                f"module {name!r} was called with id {missing}, which none of its features "
                f"({', '.join(spec.features)}) holds: add the feature to `ids` of parallelize"
            )
        return rows, part, index

    # ---- for checkpoints, export and evaluation

    def get_local_state(self, name: str) -> dict[str, Tensor]:
        """Views of this rank's part of a table: `rows` and the state of its optimizer, in spread
        order, on the host if they are at home there. Whoever writes to them calls `reload`."""
        return self.get_group(name).rows.get_tensors(name)

    def reload(self) -> None:
        """The tensors of `get_local_state` were written to. Lanes are quiet, as after `discard`."""
        for group in self.groups:
            group.rows.reload()

    def get_local_rows(self, name: str) -> tuple[Tensor, Tensor]:
        """(ids [n], rows [n, width]) of this rank's part; over all ranks each row is there once."""
        rows = self.get_group(name).rows
        ids, weight = rows.list_rows(name)
        if self.placements[name].kind == "sharded":
            return ids, weight
        first, last = ShardLayout((self.specs[name],), self.transport.world).get_owned_range(
            0, self.transport.rank
        )
        return ids[first:last], weight[first:last]
