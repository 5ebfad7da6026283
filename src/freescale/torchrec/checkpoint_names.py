"""Names of a model in TorchRec's checkpoints: pure functions of the keys.

    model.<parameter>                               a parameter, a buffer, or the weight of a table
    optimizer.state.<parameter>.<state>             the dense optimizer's state of a parameter
    optimizer.state.<weight>.<table>.momentum1      a fused optimizer's state of a table

Prefixes before the name of a parameter or before `state.` depend on the program that saved it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from freescale.embedding.optimizers import RowOptimizer

# By row optimizer: the names of its states in fused kernels ({}: the table) and in other
# optimizers, which train data-parallel and unsharded tables.
_TABLE_STATES: dict[str, dict[str, tuple[str, str]]] = {
    "SGD": {},
    "Adagrad": {"sum": ("{}.momentum1", "sum")},
    "RowWiseAdagrad": {"sum": ("{}.momentum1", "sum")},
    "Adam": {"first": ("{}.momentum1", "exp_avg"), "second": ("{}.exp_avg_sq", "exp_avg_sq")},
}
STEP = "step"  # of optimizers without kernels; row optimizers use the pipeline's step


def find_weights(keys: Collection[str], names: Sequence[str], prefix: str | None) -> dict[str, str]:
    """The key of each of a model's names: all of them behind one prefix. ValueError if there is no
    such prefix, or more than one, or the model lacks what the checkpoint has."""
    known = set(keys)
    if prefix is None:
        prefix = _find_prefix(known, names)
    missing = [name for name in names if prefix + name not in known]
    if missing:
        raise ValueError(
            f"it has no {prefix + missing[0]!r}; it has {_shorten(sorted(known))}. If the model is "
            "behind another prefix, name it: prefix='model.'"
        )
    found = {name: prefix + name for name in names}
    own = {name.rpartition(".")[0].rpartition(".")[0] for name in names}  # modules with modules
    for key in sorted(known - set(found.values())):
        rest = key.removeprefix(prefix)
        inside = key.startswith(prefix) and (bool(prefix) or _is_within(rest, own))
        if inside and not _split_state(key):
            raise ValueError(f"it has {key!r}, which the model has not")
    return found


def _find_prefix(keys: set[str], names: Sequence[str]) -> str:
    counts = Counter(
        key.removesuffix(name)
        for key in keys
        for name in _endings(key)
        if name in set(names) and not _split_state(key)
    )
    most = max(counts.values(), default=0)
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    if not best:
        raise ValueError(f"it has no {names[0]!r}; it has {_shorten(sorted(keys))}")
    if len(best) > 1:
        raise ValueError(
            f"it has the model more than once, behind {' and '.join(map(repr, best))}: name one, "
            f"prefix={best[0]!r}"
        )
    return best[0]


def _endings(key: str) -> Iterator[str]:
    """A key, and what remains of it after each dot."""
    yield key
    for match in re.finditer(r"\.", key):
        yield key[match.end() :]


def _is_within(name: str, modules: set[str]) -> bool:
    return any(module and name.startswith(f"{module}.") for module in modules)


def _split_state(key: str) -> list[str]:
    """What follows each `state.` of a key: the name of a parameter and of its state."""
    return [key[match.end() :] for match in re.finditer(r"(?:^|\.)state\.", key)]


def find_states(keys: Collection[str], names: Collection[str]) -> dict[str, dict[str, str]]:
    """{parameter: {name of a state: key}}. ValueError if a state is there twice."""
    known, found = set(names), dict[str, dict[str, str]]()
    for key in keys:
        for rest in _split_state(key):
            ends = [match.start() for match in re.finditer(r"\.", rest)]
            end = next((end for end in reversed(ends) if rest[:end] in known), None)
            if end is None:
                continue
            states = found.setdefault(rest[:end], {})
            if rest[end + 1 :] in states:
                raise ValueError(
                    f"it has {rest!r} twice, as {states[rest[end + 1 :]]!r} and as {key!r}: keep "
                    "one optimizer in it"
                )
            states[rest[end + 1 :]] = key
    return found


def name_table_states(
    table: str, optimizer: RowOptimizer, *, replicated: bool
) -> dict[str, tuple[str, ...]]:
    """By a row optimizer's own name: the names under which its state of a table is written, of a
    replicated one also that of data-parallel tables. ValueError if TorchRec has no such optimizer.
    """
    return {
        part: (fused.format(table), plain) if replicated else (fused.format(table),)
        for part, (fused, plain) in _list_states(optimizer).items()
    }


def match_table_states(
    table: str, optimizer: RowOptimizer, states: Mapping[str, str]
) -> dict[str, str]:
    """By a row optimizer's own name: the key of its state of a table. `states`: the keys in the
    checkpoint, by name. ValueError if the state is another optimizer's."""
    found, left = {}, {name: key for name, key in states.items() if name != STEP}
    for part, (fused, plain) in _list_states(optimizer).items():
        keys = [left.pop(name) for name in (fused.format(table), plain) if name in left]
        if not keys:
            raise ValueError(
                f"it has no {fused.format(table)!r}, which {optimizer.name} of table {table!r} "
                f"keeps; of that table it has {_shorten(list(states)) or 'no state'}: give the "
                "row_optimizer that it was trained with, or load weights alone"
            )
        found[part] = keys[0]
    if left:
        raise ValueError(
            f"it has {next(iter(left))!r}, a state of table {table!r} which {optimizer.name} does "
            "not keep: give the row_optimizer that it was trained with, or load weights alone"
        )
    return found


def _list_states(optimizer: RowOptimizer) -> dict[str, tuple[str, str]]:
    if optimizer.name not in _TABLE_STATES:
        raise ValueError(f"TorchRec has no fused optimizer that is {optimizer.name}")
    return _TABLE_STATES[optimizer.name]


def _shorten(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
