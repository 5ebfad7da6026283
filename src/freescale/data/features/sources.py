"""The files that features come from, and which of their columns are features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from freescale.config import DataConfig
from freescale.config.columns import parse_columns
from freescale.config.features import (
    OF_EVENTS,
    PART_OF,
    REQUEST,
    Feature,
    Request,
    request_features,
)
from freescale.data.features.attributes import (
    AttributeFile,
    infer_kind,
    open_attributes,
    read_sample,
)
from freescale.data.features.inference import Column, complete_kinds
from freescale.data.features.store import list_stored
from freescale.data.histories import is_histories
from freescale.data.ingest.digest import compute_digest, read_contents
from freescale.data.ingest.layouts import Layout
from freescale.data.ingest.sources import SourceFile, find_files
from freescale.data.ingest.tables import lay_out, read_tables
from freescale.data.ingest.yambda import MAPPINGS, is_yambda, write_items
from freescale.data.workspace import make_folder

LISTS = ("multi", "vector")  # kinds of several values, which events do not have
ITEMS = "items.parquet"  # made of Yambda's mappings


@dataclass(frozen=True)
class Sources:
    """The files that features come from."""

    events: SourceFile | None  # the first file of the interactions; None: histories
    layout: Layout | None  # layout of the events
    attributes: Mapping[str, AttributeFile]  # by source: `item`, `user`
    follows: bool = False  # the events have not come yet

    @property
    def event_names(self) -> list[str]:
        """Columns of the interactions that are not user, item or time."""
        if self.layout is None:
            return []
        roles = self.layout.roles
        used = [roles[role] for role in ("user", "item", "time") if role in roles]
        return [name for name in self.layout.names if name and name not in used]

    def expect_columns(self, features: Sequence[Feature]) -> list[str]:
        """The columns that events of a stream need for features: those of no other source."""
        given = {*REQUEST, *(name for file in self.attributes.values() for name in file.names)}
        return [
            name
            for each in features
            for name in each.columns
            if name not in given or (each.source in OF_EVENTS and len(each.columns) == 1)
        ]


def open_sources(config: DataConfig, cache: Path) -> Sources:
    """Finds out how the files are laid out. Reads no values."""
    first = None if config.follow is not None else find_files(config.data, cache)[0]
    events, layout, given = None, None, parse_columns(config.columns)
    if first is not None and not (first.is_parquet and is_histories(first.path)):
        events, layout = first, lay_out(first, config.format, given)
    roles, attributes = given if layout is None else layout.roles, {}
    items = config.items or find_mapped_items(config.data, cache)
    for source, path in (("item", items), ("user", config.users)):
        if path is None:
            continue
        files = find_files(path, cache)
        if len(files) > 1:
            raise ValueError(f"--{source}s {path}: {len(files)} files; give one")
        name = roles.get(source, f"{source}_id")
        opened = open_attributes(files[0], source, name)
        if source == "item" and config.items is None:  # numbers that are no amounts
            ids = replace(opened.layout, declared=dict.fromkeys(MAPPINGS, "id"))
            opened = replace(opened, layout=ids)
        attributes[source] = opened
    return Sources(events, layout, attributes, config.follow is not None)


def find_mapped_items(data: str, cache: Path) -> str | None:
    """The file with artist and album of each item of Yambda, in the cache; None for other data."""
    folder = Path(data)
    if not is_yambda(folder):
        return None
    paths = [folder / name for name in MAPPINGS.values()]
    digests = read_contents(paths, cache / "digests", lambda share: None)
    name = f"yambda-{compute_digest(*(content.digest for content in digests))}"

    def write(target: Path) -> None:
        write_items(folder, target / ITEMS)

    return str(make_folder(cache, name, f"the items of {data}", write) / ITEMS)


def get_request(config: DataConfig) -> Request:
    """The features that a run uses."""
    has_items = config.items is not None or is_yambda(Path(config.data))
    given = [s for s, there in (("item", has_items), ("user", config.users is not None)) if there]
    return request_features(config.features, config.schema, given)


def find_columns(sources: Sources, request: Request) -> list[Feature]:
    """Finds the source of each listed feature; returns all columns if none are listed. ValueError
    for a column that is in no file, or in several."""
    names = {source: file.names for source, file in sources.attributes.items()}
    names["event"] = sources.event_names
    if sources.follows:
        names["event"] = sources.expect_columns(request.listed or ())
    every = {**names, "context": names["event"]}  # never meant without being named
    if request.listed is None:
        return [Feature(n, source, None, (n,)) for source in request.all_of for n in names[source]]
    found = []
    for feature in request.listed:
        among = [feature.source] if feature.source else list(names)
        homes = [s for s in among if set(feature.columns) <= set(every.get(s, ()))]
        joined = None if homes else _join_parts(feature, names)
        if joined is not None:
            found.append(joined)
            continue
        if not homes:
            shown = "; ".join(
                f"{source}: {', '.join(columns)[:200] or 'none'}"
                for source, columns in every.items()
                if source in among
            )
            hint = "" if sources.attributes else " (attributes are in files of --items and --users)"
            raise ValueError(
                f"feature {feature.name!r}: column {' or '.join(map(repr, feature.columns))} is "
                f"missing; there are columns of {shown}{hint}; name one of these"
            )
        if len(homes) > 1:
            choices = " or ".join(f"{home}.{feature.name}" for home in homes)
            raise ValueError(
                f"feature {feature.name!r} is a column of several files; say which: {choices}"
            )
        found.append(replace(feature, source=homes[0]))
    return found


def _join_parts(feature: Feature, names: Mapping[str, Sequence[str]]) -> Feature | None:
    """A feature of requests that is made of several sources, with each part's; else None."""
    if feature.kind not in ("cross", "id") or feature.source not in ("", "context"):
        return None
    given = {"item": names.get("item", ()), "event": names["event"], "request": REQUEST}
    parts = []
    for column in feature.columns:
        homes = [source for source, columns in given.items() if column in columns]
        if not homes:
            return None
        if len(homes) > 1 and "request" not in homes:
            raise ValueError(
                f"feature {feature.name!r}: {column!r} is a column of several files; rename one"
            )
        parts.append(f"{homes[0]}{PART_OF}{column}")
    if feature.kind == "id" and not feature.rows:
        raise ValueError(f"feature {feature.name!r}: write how many ids, as {feature.name}=id:1000")
    return replace(feature, source="context", columns=tuple(parts))


def infer_events(sources: Sources, names: Sequence[str]) -> list[Column]:
    """Infers the kinds of columns of the interactions by their first rows."""
    assert sources.events is not None and sources.layout is not None
    file, layout = sources.events, sources.layout
    values = read_sample(read_tables(file, layout, list(names)), names)
    return [infer_kind(file, layout, name, "event", values[name]) for name in names]


def declare_events(config: DataConfig, cache: Path) -> list[Feature]:
    """The features of a run that are columns of the interactions, with their kinds. Reads the first
    rows of these if they decide."""
    request = get_request(config)
    if not request:
        return []
    sources = open_sources(config, cache)
    features = [each for each in find_columns(sources, request) if each.source in OF_EVENTS]
    if features and sources.layout is None and not sources.follows:
        raise ValueError(
            f"{config.data}: a histories file, and event features ({features[0].name}) are made of "
            "interactions only: give those"
        )
    outcomes = sources.layout.outcomes if sources.layout is not None else set()
    for feature in features:
        if feature.source == "context" and (known := outcomes & {*feature.stored_columns}):
            raise ValueError(
                f"feature {feature.label} describes a request by {min(known)!r}, which is known "
                "only after it; leave it out"
            )
    if all(feature.kind is not None for feature in features):
        return _refuse_lists(features)
    unknown = [feature.name for feature in features if feature.kind is None]
    if sources.follows:
        name = unknown[0]
        raise ValueError(f"feature {name!r} with --follow: say its kind, as {name}=categorical")
    columns = infer_events(sources, list(dict.fromkeys(unknown)))
    if request.listed is None:
        columns = [column for column in columns if column.used and column.feature.kind not in LISTS]
        return [column.feature for column in columns]
    return _refuse_lists(complete_kinds(features, columns))


def list_event_columns(config: DataConfig, cache: Path) -> list[str]:
    """The columns of the histories file that event features need."""
    declared = declare_events(config, cache)
    return list(dict.fromkeys(name for each in declared for name in list_stored(each)))


def refuse_leaks(context: Sequence[Feature], task: str, labels: Set[str]) -> None:
    """Refuses features of requests that give away what is predicted, as columns of `labels`."""
    for feature in context:
        if task == "retrieval" and feature.is_joined:
            raise ValueError(
                f"feature {feature.label} is made of the candidate and its request, and retrieval "
                "has no candidates: leave it out, or use --task ranking"
            )
        if known := labels & {*feature.stored_columns}:
            raise ValueError(
                f"feature {feature.label} describes a request by {min(known)!r}, which a label is "
                "made of; leave it out"
            )


def _refuse_lists(features: list[Feature]) -> list[Feature]:
    for feature in features:
        if feature.kind in LISTS:
            raise ValueError(
                f"feature {feature.label} is {feature.kind}: events have features of one "
                f"value; use {feature.name}=categorical, or a column of --items"
            )
    return features
