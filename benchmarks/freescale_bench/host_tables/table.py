"""Tables in host memory and on a disk beside others, as tables of the documents."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, single

_WORDS = {"memory": "memory", "disk": "disk, behind a cache"}
_PEER = {
    "freescale device": "FreeScale, table on the GPU",
    "freescale host": "FreeScale, `host`",
    "freescale host direct": "FreeScale, `host:...:direct`",
    "torchrec device": "TorchRec, table on the GPU",
    "torchrec uvm caching": "TorchRec, FUSED_UVM_CACHING, prefetched",
}


def format_peer(used: Results, folder: str) -> str:
    result = single(used)
    head = ("", "step", "samples/s", "slow-down against its own table on the GPU")
    cells = []
    for row in result["rows"]:
        slower = result["figures"].get(f"{row['arm']}: slow-down")
        cells.append(
            (
                _PEER[row["arm"]],
                f"{row['step_ms']['median']:.1f} ms",
                f"{row['samples_per_second']['median']:,.0f}",
                f"{slower:.2f} x" if slower is not None else "",
            )
        )
    shape = result["shape"]
    ids = shape["samples"] * shape["median_length"]
    missed = next(row for row in result["rows"] if row["arm"] == "freescale host direct")
    conditions = (
        f"{shape['rows']:,} rows of width {shape['width']}, a tenth of them cached; "
        f"{ids:,.0f} different rows a step, of which {missed['cache_missed']:,.0f} miss."
    )
    return format_table(used, folder, head, cells, conditions=conditions)


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
