"""What a histories file holds: a report before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.config import DataConfig
from freescale.config.features import Feature
from freescale.data.batches.loader import Histories
from freescale.data.batches.specs import ReadSpec, SampleSpec, SplitSpec
from freescale.data.batches.splits import LEAST_EVENTS
from freescale.data.features.inference import Column, complete_kinds
from freescale.data.features.sources import (
    LISTS,
    Sources,
    find_columns,
    get_request,
    infer_events,
    open_sources,
)
from freescale.data.histories import HistoriesFile
from freescale.data.synthetic.draws import CollisionCounter

_BATCHES = 20  # consecutive batches over which collisions are counted
_NEEDED = LEAST_EVENTS["leave-one-out"]
_BAR = 40  # characters of the longest bar


@dataclass(frozen=True)
class Inspection:
    """What `inspect_histories` found."""

    read_as: tuple[str, ...]
    lengths: NDArray[np.int64]  # [users]
    item_counts: NDArray[np.int64]  # [rows of the item table]: events of each
    first_time: int
    last_time: int
    dropped_users: int
    max_length: int
    global_batch: int
    # Share of a batch's rows that the previous batch reads too: of histories and targets, and with
    # negatives. None: only one batch.
    collisions: float | None
    collisions_with_negatives: float | None

    @property
    def users(self) -> int:
        return len(self.lengths)

    @property
    def leaves_one_out(self) -> bool:
        """Whether any user has the events that `--split leave-one-out` needs to train."""
        return bool((self.lengths >= _NEEDED).any())

    @property
    def events(self) -> int:
        return int(self.lengths.sum())

    @property
    def items(self) -> int:
        """Items that occur."""
        return int((self.item_counts > 0).sum())


def inspect_histories(
    path: Path,
    global_batch: int,
    max_length: int,
    num_items: int | None = None,
    labels: Sequence[str] = (),
) -> Inspection:
    """Reads a histories file once, and some of its batches as training makes them.

    Raises ValueError if a label is missing or not 0 and 1.
    """
    file = HistoriesFile(path, num_items)
    if labels:
        Histories(
            path,
            global_batch,
            sample=SampleSpec(task="ranking", tasks=labels),
            read=ReadSpec(num_items=num_items),
        )
    lengths, counts = [], np.zeros(file.num_items, np.int64)
    first, last = [], []
    for number in range(file.num_groups):
        group = file.read(number, ("item_id", "timestamp"))
        lengths.append(np.diff(group.offsets))
        counts += np.bincount(group.values["item_id"], minlength=file.num_items)
        if len(times := group.values["timestamp"]):
            first.append(int(times.min()))
            last.append(int(times.max()))
    rates = _count_collisions(path, global_batch, max_length, num_items)
    return Inspection(
        file.read_as,
        np.concatenate(lengths),
        counts,
        min(first, default=0),
        max(last, default=0),
        file.dropped_users,
        max_length,
        global_batch,
        *rates,
    )


def _count_collisions(
    path: Path, global_batch: int, max_length: int, num_items: int | None
) -> tuple[float | None, float | None]:
    data = Histories(
        path,
        global_batch,
        sample=SampleSpec(max_length=max_length),
        split=SplitSpec("none"),
        read=ReadSpec(num_items=num_items),
    )
    own, all_rows = CollisionCounter(data.num_items), CollisionCounter(data.num_items)
    for number in range(min(_BATCHES, data.batches_per_epoch)):
        batch = data.batch(number)
        sequences = (batch.sequences["history"].values, batch.sequences["targets"].values)
        rows = [values.numpy() for values in sequences]
        own.add(np.unique(np.concatenate(rows)))
        # of each sample, or of the batch
        drawn = [part["negatives"] for part in (batch.dense, batch.shared) if "negatives" in part]
        rows += [negatives.numpy().ravel() for negatives in drawn]
        all_rows.add(np.unique(np.concatenate(rows)))
    return own.rate, all_rows.rate


def describe_inspection(found: Inspection) -> list[str]:
    """Report lines."""
    lengths, counts = found.lengths, found.item_counts
    middle = np.percentile(lengths, [50, 90, 99]).astype(int)
    lines = [
        *found.read_as,
        f"users   {found.users:>12,}",
        f"items   {found.items:>12,}  (rows of the item table: {len(counts):,})",
        f"events  {found.events:>12,}  (times {found.first_time} to {found.last_time})",
        f"events of a user: mean {lengths.mean():.1f}, median {middle[0]:,}, 90 % up to "
        f"{middle[1]:,}, 99 % up to {middle[2]:,}, most {lengths.max():,}",
        *draw_lengths(lengths),
    ]
    popular = np.sort(counts)[::-1][: max(found.items // 100, 1)].sum() / max(found.events, 1)
    lines.append(f"the most popular 1 % of the items have {popular:.0%} of the events")
    if found.collisions is not None and found.collisions_with_negatives is not None:
        lines.append(
            f"collisions, global batch {found.global_batch}: {found.collisions:.0%} of the rows "
            f"that a batch reads for histories and targets, the previous batch reads too "
            f"({found.collisions_with_negatives:.0%} with its negatives)"
        )
    else:
        lines.append(
            f"collisions: none to count, since a batch of {found.global_batch} holds all users "
            "(see --global-batch)"
        )
    return lines + _describe_dropped(found)


def draw_lengths(lengths: NDArray[Any]) -> list[str]:
    """A histogram of lengths, by powers of two."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    lines = []
    for power in range(int(powers.min()), len(counts)):
        name = f"{2**power:,} to {2 ** (power + 1) - 1:,}"
        full = counts[power] * _BAR * 8 // max(counts.max(), 1)
        part = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"[full % 8].strip()
        bar = "\u2588" * (full // 8) + (part or ("" if full or not counts[power] else "\u258f"))
        lines.append(f"  {name:>18} {bar} {counts[power]:,}")
    return lines


def _describe_dropped(found: Inspection) -> list[str]:
    lines = []
    if found.dropped_users:
        lines.append(f"left out: {found.dropped_users:,} users with fewer than 2 events")
    short = int((found.lengths < _NEEDED).sum())
    if short:
        lines.append(
            f"not trained on by --split leave-one-out, which needs {_NEEDED} events: {short:,} "
            "users with 2 or 3"
        )
    cut = np.maximum(found.lengths - found.max_length - 1, 0)
    if cut.any():
        lines.append(
            f"beyond --max-length {found.max_length}: the oldest {int(cut.sum()):,} events of "
            f"{int((cut > 0).sum()):,} users"
        )
    return lines


def inspect_features(
    config: DataConfig, cache: Path
) -> tuple[list[str], list[Feature], dict[str, str]]:
    """Reads the columns of --items and --users, and the first rows of those of the interactions.
    Returns report lines; the features that `freescale train` makes with these settings, with their
    kinds; and what is known of each column, by label."""
    sources = open_sources(config, cache)
    names = sources.event_names
    found = infer_events(sources, names) if names else []
    lists = "events have features of one value"
    columns = {"event": [column.without(LISTS, lists) for column in found]}
    for source, of_file in sources.attributes.items():
        read = of_file.open(of_file.names)
        columns[source] = [of_file.infer(name, read([name])[name]) for name in of_file.names]
    chosen = _choose(config, sources, columns)
    used = {f"{each.source}.{name}" for each in chosen for name in each.columns}
    kinds = {each.label: each.kind for each in chosen}
    lines, unused = [], []
    for source, of in columns.items():
        if not of:
            continue
        file = sources.events if source == "event" else sources.attributes[source].file
        lines.append(f"columns of {file}:")
        width = max(len(column.feature.name) for column in of)
        for column in of:
            label = column.feature.label
            kind = kinds.get(label, column.feature.kind)
            state = f"{kind}" if kind else f"left out: {column.reason}"
            if kind and label not in used:
                state += ", not used"
                unused.append(column.feature.name)
            about = f"{column.different:,} values, {column.missing:.1%} missing"
            lines.append(f"  {column.feature.name:{width}}  {about:28}  {state}")
    if unused:
        option = "auto" if not chosen else ",".join([*(f.name for f in chosen), *unused])
        lines.append(f"use them as features: --features {option}")
    notes = {c.feature.label: c.describe() for of in columns.values() for c in of}
    return lines, chosen, notes


def _choose(
    config: DataConfig, sources: Sources, columns: dict[str, list[Column]]
) -> list[Feature]:
    request = get_request(config)
    if not request:
        return []
    inferred = [column for of in columns.values() for column in of]
    if request.listed is None:
        usable = [
            column.feature
            for column in inferred
            if column.used and column.feature.source in request.all_of
        ]
        return [f for f in usable if f.source != "event" or f.kind not in LISTS]
    return [
        complete_kinds([feature], [c for c in inferred if c.feature.source == feature.source])[0]
        for feature in find_columns(sources, request)
    ]
