"""A table on a disk beside one in memory, as a table of the documents."""

from __future__ import annotations

from freescale.bench.common.markdown import Results, format_table, single

_WORDS = {"memory": "memory", "disk": "disk, behind a cache"}


def format_cgroup(used: Results, folder: str) -> str:
    result = single(used)
    head = ("rows and state", "samples/s", "memory of the process", "rows that missed")
    cells = []
    for row in result["rows"]:
        missed = 100 * row["cache_missed"] / max(1.0, row["cache_wanted"])
        cells.append(
            (
                _WORDS[row["arm"]],
                f"{row['samples_per_second']['median']:,.0f}",
                f"{row['resident_memory_bytes'] / 1e6:,.0f} MB",
                f"{missed:.0f} %" if row["cache_wanted"] else "",
            )
        )
    on_disk = next(row for row in result["rows"] if row["arm"] == "disk")
    conditions = (
        f"{on_disk['table_bytes'] / 1e9:.1f} GB of rows and Adagrad's state, of which a cgroup "
        f"lets the process have {on_disk['limit_bytes'] / 1e6:,.0f} MB; every step misses "
        f"{on_disk['cache_missed']:,.0f} rows and writes as many back."
    )
    return format_table(used, folder, head, cells, conditions=conditions)
