"""Histories as callers have them -> columns of item rows, times, actions and features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.config.columns import parse_columns
from freescale.data.catalogue import UNKNOWN, read_texts, select_texts
from freescale.data.features.fitting import Fitted, encode_all
from freescale.data.ingest.column_names import find_roles
from freescale.data.ingest.interactions import make_action
from freescale.data.ingest.timestamps import (
    FinerTimes,
    TimestampFormat,
    UnitCheck,
    are_moments,
    detect_timestamps,
)
from freescale.data.values import BadValue, decode_text, refuse_nulls
from freescale.recommend.loading import Loaded

_ROLES = ("item", "time", "action", "rating")
_PARTS = _ROLES[:3]  # an event that is a list has these
_FORM = "write an item, (item, time), (item, time, action) or a mapping with these"

Events = Mapping[str, Any]  # columns of a file of events by name, [events] each


@dataclass(frozen=True)
class Past:
    """Histories in order of time, as columns of all their events."""

    lengths: NDArray[np.int64]  # [users]
    items: NDArray[np.int64]  # [events] rows of the item table
    times: NDArray[np.int64] | None  # [events]; None if the model reads none
    actions: NDArray[np.int64] | None
    features: Tensor | None  # [events, places] rows of the features of events
    unknown: int = 0  # events that are left out: the model does not know their items
    keys: NDArray[np.int64] | None = None  # [events] 64-bit ids, of a dynamic table

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        """[users] the first event of each."""
        starts: NDArray[np.int64] = np.cumsum(self.lengths) - self.lengths
        return starts

    def take(self, index: NDArray[np.int64]) -> Past:
        """Some events, of one user."""
        columns = (self.items, self.times, self.actions, self.features)
        place = torch.from_numpy(index)
        found: Any = (
            column[place if isinstance(column, Tensor) else index] if column is not None else None
            for column in columns
        )
        keys = None if self.keys is None else self.keys[index]
        return replace(Past(np.array([len(index)]), *found), keys=keys)

    @staticmethod
    def concat(parts: Sequence[Past]) -> Past:
        """The users of several, for one model. A column that some events lack is left out."""
        some = [part for part in parts if len(part.items)] or parts[:1]

        def join(name: str) -> Any:
            columns = [getattr(part, name) for part in some]
            if any(column is None for column in columns):
                return None
            tensors = isinstance(columns[0], Tensor)
            return torch.cat(columns) if tensors else np.concatenate(columns)

        names = ("items", "times", "actions", "features", "keys")
        columns: Any = {name: join(name) for name in names}
        lengths = np.concatenate([part.lengths for part in parts])
        return Past(lengths, **columns, unknown=sum(part.unknown for part in parts))


class HistoryReader:
    """Reads histories for one model. `needs_times`: events must have a time."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, module = loaded, loaded.module
        self._given = parse_columns(loaded.config.data.columns)
        self.needs_times = bool(module.encoder.has_time_bias)  # type: ignore[union-attr]
        action: Any = module.action
        self._actions = 0 if action is None else int(action.num_embeddings)

    def read(self, histories: Sequence[Iterable[Any]]) -> Past:
        """Reads a list of events for each user: items, (item, time), (item, time, action) or
        mappings by column.

        Raises:
            ValueError: an event is none of these, or lacks what the model reads.
        """
        lists = []
        for user, events in enumerate(histories):
            if isinstance(events, str | bytes | Mapping):
                raise ValueError(f"histories[{user}] is {events!r:.80}: give a list of events")
            lists.append(list(events))
        lengths = np.array([len(events) for events in lists], np.int64)
        columns = _split_events(lists)
        names = list(columns)
        roles = find_roles(names, self._find_given(names), _ROLES)
        if lengths.sum() and "item" not in roles:
            raise ValueError(f"events have no item, only {', '.join(names)}: {_FORM}")
        return self._build(
            np.repeat(np.arange(len(lengths)), lengths), len(lengths), columns, roles
        )

    def read_table(self, table: Any) -> tuple[list[Any], Past]:
        """Reads a table of events, of Arrow, pandas or anything else with the Arrow interface: the
        users in order of appearance, and their histories."""
        events = table if isinstance(table, pa.Table) else pa.table(table)
        given = self._find_given(events.column_names)
        roles = find_roles(events.column_names, given, ("user", *_ROLES))
        for role in ("user", "item"):
            if role not in roles:
                raise ValueError(
                    f"no column is recognised as {role} among {', '.join(events.column_names)}: "
                    f"name it {role}"
                )
        coded = events.column(roles["user"]).combine_chunks().dictionary_encode()
        if coded.null_count:
            raise ValueError(f"column {roles['user']!r} has missing values: drop those rows")
        columns = {name: events.column(name).combine_chunks() for name in events.column_names}
        owner = np.asarray(coded.indices, np.int64)
        users = coded.dictionary.to_pylist()
        return users, self._build(owner, len(users), columns, roles)

    def _find_given(self, names: Sequence[str]) -> dict[str, str]:
        return {role: name for role, name in self._given.items() if name in names}

    def _build(
        self, owner: NDArray[np.int64], users: int, columns: Events, roles: Mapping[str, str]
    ) -> Past:
        values = columns[roles["item"]] if "item" in roles else []
        known = self._loaded.catalogue
        given = values.to_pylist() if isinstance(values, pa.Array) else values
        keys = known.hash(given)
        items = known.find(given) if keys is None else known.find_keys(keys)
        times = self._read_times(columns, roles)
        actions = self._read_actions(columns, roles, len(items))
        order = np.lexsort((owner,) if times is None else (times, owner))
        order = order[items[order] != UNKNOWN]

        def take(column: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
            return None if column is None else column[order]

        features = self._loaded.features
        codes = None
        if features is not None and features.event:
            codes = encode(features.event, columns, len(items))[torch.from_numpy(order)]
        return Past(
            np.bincount(owner[order], minlength=users).astype(np.int64),
            items[order],
            take(times) if self.needs_times else None,
            take(actions),
            codes,
            len(items) - len(order),
            take(keys),
        )

    def _read_times(self, columns: Events, roles: Mapping[str, str]) -> NDArray[np.int64] | None:
        if "time" not in roles:
            if self.needs_times and any(len(column) for column in columns.values()):
                raise ValueError(
                    "the model reads the time of each event: give (item, time), in "
                    f"{self._describe_unit()}"
                )
            return np.zeros(0, np.int64) if self.needs_times else None
        return self.read_times(columns[roles["time"]], roles["time"])

    def read_times(self, values: Any, name: str = "time") -> NDArray[np.int64]:
        """Times [n] in the unit of the model: integers as they are, dates converted."""
        unit = self._loaded.time_unit
        if unit is not None and {*map(type, values)} == {int} and are_moments(values, unit):
            return np.array(values, np.int64)  # most are, and this is quick
        try:
            given = decode_text(values if isinstance(values, pa.Array) else pa.array(values))
            refuse_nulls(given)
            found, numbers = _parse_times(name, given)
        except (BadValue, pa.ArrowException) as error:
            raise ValueError(f"{name}: {error}; the model reads {self._describe_unit()}") from None
        if found.unit not in (None, unit) and unit is not None:
            if found.kind != "dates":
                raise ValueError(
                    f"{name}: {numbers[0]} reads as {found.meaning}, and the model was trained "
                    f"with {self._describe_unit()}: convert them"
                )
            since = numbers.cast(pa.timestamp(found.unit))
            numbers = since.cast(pa.timestamp(unit), safe=False).cast(pa.int64())
        elif found.kind == "dates" and unit is None:
            raise ValueError(
                f"{name}: dates, and the model was trained with numbers of no known unit: give such"
            )
        return np.array(numbers)

    def _describe_unit(self) -> str:
        unit = self._loaded.time_unit
        return "the unit of the training data" if unit is None else f"{unit} since 1970"

    @cached_property
    def _action_codes(self) -> dict[Any, int] | None:
        texts = self._loaded.texts
        if texts is not None:  # the file may be of another state, or gone
            found = select_texts(texts, "action")
        else:
            found = read_texts(self._loaded.vocabulary, "action")
        return None if found is None else dict(zip(found[1].to_pylist(), found[0].tolist()))

    @cached_property
    def actions(self) -> dict[Any, int]:
        """Codes of the actions that the model knows."""
        codes = self._action_codes if self._actions else {}
        return {n: n for n in range(self._actions)} if codes is None else codes

    def _read_actions(
        self, columns: Events, roles: Mapping[str, str], events: int
    ) -> NDArray[np.int64] | None:
        if not self._actions:
            return None
        if "action" in roles:
            given = columns[roles["action"]]
            given = given.to_pylist() if isinstance(given, pa.Array) else given
            texts, known = self._action_codes, self.actions
            found = [known.get(each if texts is None else str(each)) for each in given]
            if None in found:
                wrong, names = given[found.index(None)], list(known)
                listed = f"0 to {names[-1]}" if texts is None else ", ".join(map(str, names[:10]))
                raise ValueError(f"action {wrong!r} is unknown: the model knows {listed}")
            return np.array(found, np.int64)
        if "rating" in roles:
            ratings = columns[roles["rating"]]
            try:
                made = make_action(ratings if isinstance(ratings, pa.Array) else pa.array(ratings))
            except (BadValue, pa.ArrowException) as error:
                raise ValueError(f"ratings: {error}") from None
            return np.asarray(made).clip(max=self._actions - 1)
        if events:
            raise ValueError("the model reads the action of each event: give (item, time, action)")
        return np.zeros(0, np.int64)

    def describe_users(
        self, users: Sequence[Mapping[str, Any]] | None, count: int
    ) -> Tensor | None:
        """Rows [count, places] of the features of users by their columns; None without any."""
        features = self._loaded.features
        return None if features is None else _describe(features.user, users, count, "users")

    def describe_requests(
        self, context: Sequence[Mapping[str, Any]] | None, count: int
    ) -> Tensor | None:
        """Rows [count, places] of the features of requests by their columns; None without any."""
        features = self._loaded.features
        return None if features is None else _describe(features.context, context, count, "context")


def encode(fitted: Sequence[Fitted], columns: Events, count: int) -> Tensor:
    """Rows [count, places] of features; columns that are not given are missing."""
    found = {}
    try:
        for name in dict.fromkeys(name for each in fitted for name in each.feature.columns):
            values = columns.get(name)
            if values is None:
                values = pa.nulls(count)
            found[name] = values if isinstance(values, pa.Array) else pa.array(values)
        return torch.from_numpy(encode_all(fitted, found).astype(np.int64))
    except (BadValue, pa.ArrowException) as error:
        names = ", ".join(each.feature.label for each in fitted)
        raise ValueError(f"features {names}: {error}") from None


def _describe(
    fitted: Sequence[Fitted], given: Sequence[Mapping[str, Any]] | None, count: int, what: str
) -> Tensor | None:
    if not fitted:
        return None
    rows = [{}] * count if given is None else given
    if len(rows) != count:
        raise ValueError(f"{what} has {len(rows)} entries for {count} histories: give one for each")
    names = {name for each in fitted for name in each.feature.columns}
    return encode(fitted, {name: [row.get(name) for row in rows] for name in names}, count)


def _split_events(histories: Sequence[Sequence[Any]]) -> Events:
    """Columns of all events of users."""
    events = list(chain.from_iterable(histories))
    kinds = {*map(type, events)}
    if kinds and kinds <= {int, str}:  # the usual forms, quickly
        return {"item": events}
    if kinds and kinds <= {list, tuple} and len(sizes := {*map(len, events)}) == 1:
        (size,) = sizes
        if 1 <= size <= len(_PARTS):
            return {name: list(values) for name, values in zip(_PARTS, zip(*events))}
    rows = [
        _name_parts(event, f"histories[{user}][{number}]")
        for user, history in enumerate(histories)
        for number, event in enumerate(history)
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _name_parts(event: Any, where: str) -> Mapping[str, Any]:
    if isinstance(event, Mapping):
        return event
    if isinstance(event, tuple | list):
        if not 1 <= len(event) <= 3:
            raise ValueError(f"{where} is {event!r:.80}: {_FORM}")
        return dict(zip(_PARTS, event))
    if isinstance(event, str | int | np.integer):
        return {"item": event}
    raise ValueError(f"{where} is {event!r:.80}: {_FORM}")


def _parse_times(name: str, values: pa.Array) -> tuple[TimestampFormat, pa.Array]:
    found = detect_timestamps("histories", name, values, None)
    while True:
        try:
            return found, found.parse(values, UnitCheck())
        except FinerTimes:
            found = found.refine()
