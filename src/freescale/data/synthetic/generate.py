"""Production-like histories with a chosen length distribution, popularity and collision rate
between batches.

Items of adjacent popularity are paired. An event that is *bound* takes the even item of its pair in
even batches and the odd one in odd batches, and can collide with no bound event of the neighbouring
batches. Binding every event gives 0 % collisions, binding none those of the popularity alone. For
more, events are *hot*: drawn from the most popular items only. One number from 0 to 2, the mixing,
covers all of this; bisection on the measured rate finds it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from freescale.batch import compute_offsets
from freescale.config import GenerateConfig
from freescale.data.batches.specs import check_least
from freescale.data.histories import HistoriesMetadata, make_fingerprint
from freescale.data.histories_writer import HistoriesWriter, make_schema
from freescale.data.synthetic.draws import (
    SHORTEST,
    TASTES,
    CollisionCounter,
    DrawnBatch,
    LengthDistribution,
    SyntheticSource,
    calibrate_mixing,
)
from freescale.data.workspace import explain_full_disk, workspace
from freescale.random import derive, hash_name, integers, normal, uniform

_EPOCH = 1_600_000_000  # last event of the first user, in seconds


@dataclass(frozen=True)
class SyntheticReport:
    path: Path
    users: int
    items: int
    tokens: int
    lengths: dict[str, int]  # quantiles: p50, p90, p99, max
    batches: int
    # over all pairs of consecutive global batches; None with one batch only
    measured_collision: float | None


def generate(
    path: str | Path,
    *,
    users: int,
    items: int,
    lengths: str = GenerateConfig.lengths,
    median: float = GenerateConfig.median,
    sigma: float = GenerateConfig.sigma,
    zipf_exponent: float = GenerateConfig.zipf_exponent,
    cap: int = GenerateConfig.cap,
    popularity: float = GenerateConfig.popularity,
    collision: float | None = GenerateConfig.collision,
    global_batch: int = GenerateConfig.global_batch,
    ranks: int = GenerateConfig.ranks,
    seed: int = GenerateConfig.seed,
    actions: bool = False,
    labels: Sequence[str] = (),
    progress: Callable[[str, float], None] | None = None,
) -> SyntheticReport:
    """Writes a histories file, users in the order of their last event, one global batch at a time.

    Args:
        path: Where to write.
        users: Histories in the file.
        items: Size of the catalogue.
        lengths: "lognormal" (median, sigma) or "zipf" (zipf_exponent).
        median: Of the lengths.
        sigma: Of the logarithm of the lengths.
        zipf_exponent: Of the lengths.
        cap: Longest history; the shortest has 2 events.
        popularity: Zipf exponent of the items; 0 is uniform.
        collision: Share of a global batch's requests (distinct item ids of each rank, added up)
            that the batch before also makes, in file order, over all events of the histories. A
            loader sees it with shuffle=False, split="none" and a max_length that cuts nothing;
            negatives are not counted. Met to a percentage point. None leaves what the popularity
            gives.
        global_batch: Users of a global batch.
        ranks: Ranks that share a global batch.
        seed: Of everything that is drawn.
        actions: Whether to add a column `action`: 1 inside a run, plus 2 << i where label i is 1.
        labels: Names of 0/1 columns, which depend on the item, the user's taste and chance.
        progress: Called with "generate" and the share done.

    Returns:
        What was written, with the collision rate as measured.

    Raises:
        ValueError: An option is out of range, or the collision rate is out of reach.
        OSError: The disk is full.
    """
    path = Path(path)
    check_least(1, users=users, items=items, global_batch=global_batch, ranks=ranks)
    check_least(SHORTEST, cap=cap)
    check_least(0, sigma=sigma, popularity=popularity)
    _check_labels(labels)
    if collision is not None:
        _check_collision(collision, users, items, global_batch)
    shape = (lengths, median, sigma, zipf_exponent, cap)
    distribution = LengthDistribution.from_options(*shape)
    source = SyntheticSource(users, items, distribution, popularity, global_batch, ranks, seed)
    mixing = None if collision is None else calibrate_mixing(source, collision)
    columns = {"item_id": pa.int64(), "timestamp": pa.int64()} | (
        {"action": pa.int64()} if actions else {}
    )
    schema = make_schema(columns | {name: pa.int8() for name in labels})
    collisions, histogram = CollisionCounter(items), np.zeros(cap + 1, np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    fix = "make room, or name another folder"
    full = explain_full_disk(path.parent, f"generating {path.name}", fix)
    with full, workspace(path.parent, path.name) as folder:
        made = folder / path.name
        writer, metadata = HistoriesWriter(made, schema), None
        try:
            for number in range(source.batches):
                batch = source.draw_batch(number)
                ids = source.choose_items(batch, mixing)
                collisions.add(source.list_requests(batch, ids))
                histogram += np.bincount(batch.lengths.numpy(), minlength=len(histogram))
                writer.write(_make_table(source, batch, ids, schema, labels))
                if progress is not None:
                    progress("generate", (number + 1) / source.batches)
            rate, tokens = collisions.rate, int((histogram * np.arange(len(histogram))).sum())
            assert collision is None or (rate is not None and abs(rate - collision) <= 0.01)
            options = (users, items, *shape, popularity, collision)
            fingerprint = make_fingerprint(
                "synthetic", options, global_batch, ranks, seed, actions, list(labels)
            )
            metadata = HistoriesMetadata(
                items, users, tokens, 0, tuple(schema.names[1:]), fingerprint
            )
        finally:
            writer.close(metadata)
        os.replace(made, path)
    ends = np.cumsum(histogram)
    quantiles = {f"p{q}": int(np.searchsorted(ends, q / 100 * users)) for q in (50, 90, 99)}
    quantiles["max"] = int(np.flatnonzero(histogram)[-1])
    return SyntheticReport(path, users, items, tokens, quantiles, source.batches, rate)


def _check_labels(labels: Sequence[str]) -> None:
    taken = {"user_id", "item_id", "timestamp", "action"} & set(labels)
    if taken or len(set(labels)) < len(labels):
        raise ValueError(
            f"labels {', '.join(labels)}: each needs a name of its own, other than "
            "user_id, item_id, ..."
        )


def _check_collision(collision: float, users: int, items: int, global_batch: int) -> None:
    if not 0 <= collision <= 1:
        raise ValueError(f"collision is {collision}; it is a share, in [0, 1]")
    if users <= global_batch:
        raise ValueError(
            f"collision needs two global batches, {users} users are one of "
            f"{global_batch}; give more"
        )
    if items < 2 and collision < 0.99:
        raise ValueError(
            f"collision {collision} is out of reach with {items} item: only 1.0 is; "
            "give 2 items or more"
        )


def _make_table(
    source: SyntheticSource,
    batch: DrawnBatch,
    items: NDArray[Any],
    schema: pa.Schema,
    labels: Sequence[str],
) -> pa.Table:
    offsets = compute_offsets(batch.lengths)
    lists = pa.array(offsets.numpy(), pa.int32())
    owner = torch.repeat_interleave(torch.arange(len(batch.users)), batch.lengths)
    # Gaps before each event: seconds inside a run, up to a day between runs (log-uniform).
    spread = uniform(derive(batch.keys, 5))
    gap = torch.where(batch.inside_run, 1 + 59 * spread, 60 * (1440**spread)).to(torch.int64)
    clock = torch.cumsum(gap, 0)
    end = clock[offsets[1:] - 1]
    times = _EPOCH + 60 * batch.users[owner] - (end[owner] - clock)
    columns = {"item_id": torch.from_numpy(items), "timestamp": times}
    taste = integers(derive(source.seed, hash_name("taste"), batch.users), TASTES)[owner]
    action = batch.inside_run.to(torch.int64)
    for number, name in enumerate(labels):
        of_item = hash_name("appeal"), hash_name(name), columns["item_id"]
        of_taste = hash_name("taste's appeal"), hash_name(name), taste, columns["item_id"]
        appeal = 2 * normal(derive(source.seed, *of_item)) + normal(derive(source.seed, *of_taste))
        flag = uniform(derive(batch.keys, 6 + number)) < torch.sigmoid(appeal.to(torch.float64))
        columns[name] = flag.to(torch.int8)
        action += flag.to(torch.int64) * (2 << number)
    columns["action"] = action
    arrays = [
        pa.ListArray.from_arrays(lists, pa.array(columns[n].numpy())) for n in schema.names[1:]
    ]
    return pa.table([pa.array(batch.users.numpy()), *arrays], schema=schema)
