"""A sharding plan of TorchRec's, as placements of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SHARDED, _REPLICATED, _BY_TABLE = "row_wise", "data_parallel", "table_wise"


def read_placements(plan: Any, tables: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """The placement of each table that a plan names.

    Args:
        plan: a ShardingPlan, or its dict: {module: {table: ParameterSharding}}.
        tables: (module, table, its name here).

    Raises:
        ValueError: a table is to be sharded in a way that there is not here.
    """
    modules = getattr(plan, "plan", plan)
    known = {module for module, *_ in tables}
    unknown = [module for module in modules if module not in known]
    if unknown:
        raise ValueError(
            f"the plan names module {unknown[0]!r}; the model's collections are "
            f"{', '.join(sorted(known))}"
        )
    placements = {}
    for module, table, name in tables:
        parameter = dict(modules.get(module, {})).get(table)
        if parameter is None:
            continue
        kind = parameter.sharding_type
        if kind == _BY_TABLE:
            print(f"table {table}: table_wise in the plan, sharded by row here", flush=True)
        elif kind not in (_SHARDED, _REPLICATED):
            raise ValueError(
                f"the plan shards table {table!r} of {module!r} {kind}, which is not supported: "
                f"tables are {_SHARDED}, or {_REPLICATED}"
            )
        placements[name] = "replicated" if kind == _REPLICATED else "sharded"
    return placements
