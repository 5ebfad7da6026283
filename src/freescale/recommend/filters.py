"""Which items are offered: ids from a file, and items by their features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.data.catalogue import UNKNOWN
from freescale.data.features.attributes import open_attributes
from freescale.data.ingest.sources import find_files
from freescale.folders import find_cache_folder
from freescale.recommend.loading import Loaded


def read_ids(path: str, role: str) -> list[Any]:
    """Reads the ids in a file: a text file (.txt) with one on each line, or a table of any format
    with a column of them. `role`: `user` or `item`."""
    if path.endswith(".txt"):
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; name a file of ids") from None
        ids: list[Any] = [line.strip() for line in lines if line.strip()]
    else:
        source = open_attributes(find_files(path, find_cache_folder())[0], role, f"{role}_id")
        ids = source.read([source.key])[source.key].drop_null().to_pylist()
    if not ids:
        raise ValueError(f"{path}: the file has no ids; give at least one {role}")
    return list(dict.fromkeys(ids))


def find_offered(
    loaded: Loaded, candidates: Sequence[Any] | None, filters: Sequence[str] = ()
) -> tuple[NDArray[np.int64] | None, int]:
    """Finds the items that may be recommended.

    Args:
        loaded: the model.
        candidates: original ids; None: all items.
        filters: as `category=shoes|boots`: items that have one of these values. All must fit.

    Returns:
        Their rows, ascending, None for all items; and how many candidates the model does not know.

    Raises:
        ValueError: a filter is not valid, or no item is left.
    """
    if candidates is None and not filters:
        return None, 0
    catalogue, unknown = loaded.catalogue, 0
    rows = catalogue.listed
    if candidates is not None:
        found = catalogue.find(candidates)
        known = (found != UNKNOWN) & (found < len(catalogue))
        rows, unknown = np.unique(found[known]), int((~known).sum())
    for text in filters:
        rows = rows[_match(loaded, text, rows)]
    if not len(rows):
        raise ValueError("no item is left to recommend: check the candidates and filters")
    return rows, unknown


def _match(loaded: Loaded, text: str, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    name, equals, wanted = text.partition("=")
    store = loaded.features
    of_items = {} if store is None else {each.feature.name: each for each in store.item}
    named = [n for n, each in of_items.items() if each.feature.kind in ("categorical", "multi")]
    shown = ", ".join(named) or "none"
    if not equals:
        raise ValueError(f"--filter {text!r}: write FEATURE=VALUE, or FEATURE=VALUE|VALUE")
    if name not in named:
        what = f"a {of_items[name].feature.kind} feature" if name in of_items else "unknown"
        raise ValueError(
            f"--filter {text!r}: {name!r} is {what}; the model has categories of items: {shown}; "
            "for other rules, write the items' ids to a file and name it with --candidates"
        )
    assert store is not None
    values = wanted.split("|")
    try:
        codes = [of_items[name].find_category(value) for value in values]
    except KeyError as error:
        raise ValueError(
            f"--filter {text!r}: {name!r} is never {error.args[0]!r} in the training data"
        ) from None
    keys = rows if loaded.catalogue.keys is None else loaded.catalogue.keys[rows]
    return np.asarray(np.isin(store.find_codes(name, keys), codes).any(axis=1))
