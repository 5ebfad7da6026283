"""Step time of a model whose item table is dynamic and full, with 10 % new ids in every batch,
against the same model with a static table of the same size.

Arms run one after another: the GPU needs to hold only one table. Batches are prepared in advance
and are the same in all arms, except that dynamic arms replace a different tenth of the ids in every
batch by ids never seen before. All arms use in-batch negatives. Windows of steps are compared
pairwise. Claims are about the default map.

Exposed time is defined by the ledger (docs/how/ledger.md): compute waits for communication after
the last rank has arrived, and for the lanes' own work, including eviction decisions. Waits for late
ranks are straggler time. The sum is the span in which compute waits for its lanes. On a GPU this is
not host time, since the host may wait while the device works off its queue. The span lies between
two events on the compute stream: one when the device has run out of work, one after the lane's
work. Ranks that share a GPU do not idle together: while one waits, the others compute. The step
time contains the net effect.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.batch import Jagged, SequenceBatch
from freescale.config import RunConfig
from freescale.embedding.dynamic_rules import SHARDS, Dynamic
from freescale.embedding.layout import DynamicLayout, compute_keys
from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.storage.dynamic import DynamicStorage
from freescale.ledger.ledger import Ledger
from freescale.ledger.merge import merge_step
from freescale.random import derive, integers
from freescale.transport.api import Transport
from freescale_bench.common.ranks import gather_json, get_gpu_name, open_rank
from freescale_bench.common.results import (
    Destination,
    Row,
    Target,
    make_claims,
    show_claims,
    spread,
    write,
)
from freescale_bench.train.shapes import SHAPES, Shape
from freescale_bench.train.trained import SMALL, WARMUP, WINDOW, Trained, list_batches, prepare

ARMS = {"static": "", "device map": ":map=device", "host map": ":map=host"}
ITEMS = ("history", "targets", "negatives")  # features that read the item table
NEW = 10  # one in so many ids of a batch is new
FAR = 1 << 40  # beyond every catalogue
FILLED = 1 << 20  # ids inserted at a time, over all ranks
LIMIT = 600.0  # seconds: limit of a collective; ranks create their tables at the same time

DEFAULT = f"{'device' if Dynamic(1).maps_on_device else 'host'} map"
TARGETS = [
    Target(DEFAULT, "step with a full dynamic table, 10 % new ids, over a static table", 1.10,
          "x", at_least=False),
    Target(f"{DEFAULT} exposed", "exposed time that the dynamic table adds, of a step", 1, "%",
          at_least=False),
]  # fmt: skip


@dataclass(frozen=True)
class StepSetting:
    device: str
    ranks: int
    rows: int  # of the table, over all ranks
    steps: int  # timed
    samples: int  # per rank
    keep: bool  # the result is written

    @property
    def shape(self) -> Shape:
        shape = SHAPES["medium"] if self.device == "cuda" else SMALL
        batches = WARMUP + self.steps + WINDOW
        samples = self.samples * self.ranks
        return replace(shape, items=self.rows - 1, samples=samples, batches=batches, users=0)

    def as_arguments(self) -> list[str]:
        names = ("device", "rows", "steps", "samples")
        words = [word for name in names for word in (f"--{name}", str(getattr(self, name)))]
        return ["step", *words, "--nproc", str(self.ranks), *([] if self.keep else ["--try"])]


def choose_setting(
    device: str, ranks: int, keep: bool, given: Mapping[str, int | None]
) -> StepSetting:
    """Fills in defaults for options that are None: sizes for an H200 shared by four ranks, or for a
    CPU, which writes no result."""
    sizes = {"rows": 50_000_000, "steps": 120, "samples": 64}
    if device == "cpu":
        sizes = {"rows": 10 * SHARDS, "steps": 20, "samples": 8}
    chosen = {name: given.get(name) or size for name, size in sizes.items()}
    if chosen["steps"] < WINDOW:
        raise ValueError(f"--steps must be at least {WINDOW}, got {chosen['steps']}")
    return StepSetting(device, ranks, keep=keep and device == "cuda", **chosen)


def renew_ids(batch: SequenceBatch, number: int) -> SequenceBatch:
    """Replaces a tenth of the ids, wherever they occur, by ids unique to this batch."""

    def renew(ids: Tensor) -> Tensor:
        chosen = integers(derive(number, ids), NEW) == 0
        return torch.where(chosen, ids + (number + 1) * FAR, ids)

    parts: dict[str, Any] = dict(batch.parts())
    for name in ITEMS:
        for key in (f"s/{name}", f"c/{name}", f"d/{name}"):
            if isinstance(part := parts.get(key), Jagged):
                parts[key] = replace(part, values=renew(part.values))
            elif isinstance(part, Tensor):
                parts[key] = renew(part)
    shared = {name: renew(v) if name in ITEMS else v for name, v in batch.shared.items()}
    return replace(batch.with_parts(parts), shared=shared, packing=None)


def make_dynamic(config: RunConfig, options: str) -> RunConfig:
    """Returns the same run with a dynamic item table of the same size. `options`: of an arm."""
    rows = f"item=dynamic:{config.data.num_items}{options}"
    return replace(
        config,
        data=replace(config.data, num_items=None),  # ids of a dynamic table are unbounded
        train=replace(config.train, rows=rows),
    )


class StepBench:
    """A rank that measures."""

    def __init__(self, setting: StepSetting, transport: Transport, folder: Path) -> None:
        """Prepares the data, written by rank 0. A collective."""
        self.setting, self.transport = setting, transport
        self.config, self.data = prepare(
            setting.shape,
            folder,
            transport,
            data={"num_items": setting.rows, "in_batch_share": 1.0},
            train={"row_optimizer": "rowwise_adagrad", "placement": "item=sharded"},
        )
        self.batches = list_batches(self.data, setting.steps, "cpu")

    def measure(self) -> list[Row]:
        """Returns a row per arm, the same on every rank."""
        rows = []
        for arm, options in ARMS.items():
            rows.append(join_ranks(arm, gather_json(self.transport, self._measure_arm(options))))
            if self.transport.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
        return rows

    def _measure_arm(self, options: str) -> dict[str, Any]:
        gc.collect()  # the previous table
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
        config = make_dynamic(self.config, options) if options else self.config
        batches = [renew_ids(b, n) if options else b for n, b in enumerate(self.batches)]
        if self.setting.device == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        trained = Trained.build(config, self.data, self.transport)
        try:
            trained.model.tables.place(batches[0])
            filled = fill_table(trained.model, self.setting.rows)
            windows, records = trained.time_windows(batches, self.setting.steps)
        finally:
            trained.pipeline.close()
        names = ("dynamic_inserted", "dynamic_evicted", "dynamic_turned_away", "dynamic_rows")
        return {
            "windows_ms": windows,
            "records": records,
            **filled,
            **{
                name: sum(record["counters"].get(name, 0.0) for record in records) / len(records)
                for name in names
            },
        }


def fill_table(model: ShardedModel, rows: int) -> dict[str, float]:
    """Inserts the ids of the catalogue in batches, then further ids until the table is full."""
    group = model.tables.get_group("item")
    storage = group.rows
    if not isinstance(storage, DynamicStorage):
        return {}
    assert isinstance(group.layout, DynamicLayout)
    first, last = group.layout.get_owned_shards(model.transport.rank)
    room, number, ledger = (last - first) * group.layout.rules.shard_rows, 0, Ledger()
    size = min(FILLED, rows)
    while storage.directory.used < 0.99 * room or number < rows:
        ids = torch.arange(number, number + size, device=storage.weight.device)
        keys = compute_keys(torch.where(ids < rows, ids, -ids))  # beyond the catalogue: other ids
        shard = (keys >> group.layout.rules.shard_bits) + group.layout.rules.shards // 2
        storage.resolve(keys[(shard >= first) & (shard < last)], ledger)
        storage.begin()
        number += size
    return {"filled_percent": 100 * storage.directory.used / room}


def join_ranks(arm: str, ranks: list[dict[str, Any]]) -> Row:
    """Merges the results of all ranks into the row of an arm."""
    steps = [merge_step(each) for each in zip(*(r["records"] for r in ranks), strict=True)]
    exposed = [sum(step["exposed_ms"].values()) for step in steps]
    lanes = [statistics.mean(step["lane_ms"]) for step in steps]
    late = [statistics.mean(step["straggler_ms"]) for step in steps]
    waited = [step["spans_ms"].get("arrive", 0.0) for step in steps]
    windows = [value for rank in ranks for value in rank["windows_ms"]]
    row: Row = {
        "arm": arm, "ranks": len(ranks), "windows_ms": windows, "step_ms": spread(windows),
        "exposed_ms": spread(exposed), "lanes_ms": spread(lanes), "straggler_ms": spread(late),
        "exposed_and_lanes_ms": spread(list(map(sum, zip(exposed, lanes, strict=True)))),
        "waited_for_lanes_ms": spread(waited),
        "spans_ms": {name: statistics.mean(step["spans_ms"].get(name, 0.0) for step in steps)
                     for name in sorted({name for step in steps for name in step["spans_ms"]})},
    }  # fmt: skip
    for name in ranks[0]:
        if name.startswith("dynamic_"):
            row[name] = sum(rank[name] for rank in ranks)
    if "filled_percent" in ranks[0]:
        row["filled_percent"] = min(rank["filled_percent"] for rank in ranks)
    return row


def collect_figures(rows: list[Row]) -> dict[str, float]:
    """Step time over that of the static table, paired by window, and the added exposed time in
    percent of a step."""
    static, *others = rows
    figures = {}
    for row in others:
        pairs = zip(row["windows_ms"], static["windows_ms"], strict=True)
        figures[row["arm"]] = statistics.median(mine / other for mine, other in pairs)
        exposed = "exposed_and_lanes_ms"  # lanes: includes eviction decisions
        added = row[exposed]["median"] - static[exposed]["median"]
        figures[f"{row['arm']} exposed"] = 100 * added / row["step_ms"]["median"]
    return figures


def bench_step(setting: StepSetting, to: Destination) -> None:
    with open_rank(setting.device, LIMIT) as (transport, folder):
        rows = StepBench(setting, transport, folder).measure()
    if transport.rank == 0:
        claims = make_claims(TARGETS, collect_figures(rows))
        if setting.keep:
            command = f"freescale bench dynamic {' '.join(setting.as_arguments())}"
            name = f"{transport.world}ranks-{get_gpu_name()}"
            write("dynamic", name, command, rows, claims, ["triton"], to=to)
        else:
            show_claims(claims)
