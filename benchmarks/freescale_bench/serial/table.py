"""The serial schedule against TorchRec, as a table."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, capitalize, format_table, single


def format_serial(used: Results, folder: str) -> str:
    result = single(used)
    rows = []
    for workload in dict.fromkeys(row["workload"] for row in result["rows"]):
        by = {
            row["arm"]: row["samples_per_second"]["median"]
            for row in result["rows"]
            if row["workload"] == workload
        }
        ours = by["FreeScale serial"]
        stock = max(by[name] for name in by if name.startswith("TorchRec") and "," not in name)
        best = max(by[name] for name in by if name.startswith("TorchRec"))
        rows.append(
            (
                workload,
                *(f"{value:.0f}" for value in (ours, stock, best)),
                f"{ours / stock:.2f} x, {ours / best:.2f} x",
            )
        )
    head = (
        "samples/s",
        "FreeScale, serial",
        "better of TorchRec's pipelines",
        "best, ids deduplicated by hand too",
        "",
    )
    conditions = f"{capitalize(result['method'])}."
    return format_table(used, folder, head, rows, conditions=conditions)
