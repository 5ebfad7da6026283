"""Tables in host memory, in FreeScale and in TorchRec."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, single

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
