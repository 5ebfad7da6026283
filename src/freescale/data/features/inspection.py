"""What the columns of the data hold, and which of them become features."""

from __future__ import annotations

from pathlib import Path

from freescale.config import DataConfig
from freescale.config.features import Feature
from freescale.data.features.inference import Column, complete_kinds
from freescale.data.features.sources import (
    LISTS,
    Sources,
    find_columns,
    get_request,
    infer_events,
    open_sources,
)


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
