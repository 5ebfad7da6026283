"""The two-level exchange as a table: bytes across the link, and step times."""

from __future__ import annotations

from freescale_bench.common.markdown import Results, format_table, format_verdict, single
from freescale_bench.exchange.bench import compute_savings


def format_exchange(used: Results, folder: str) -> str:
    found = single(used)["rows"]
    by_arm = {(r["configuration"], r["schedule"], r["exchange"]): r for r in found}
    duplicates = compute_savings(found, "rows_between_machines_by_ids")
    saved = compute_savings(found, "link_bytes_per_step")
    rows = []
    for (name, schedule), share in duplicates.items():
        flat, two = (by_arm[name, schedule, exchange] for exchange in ("flat", "two-level"))
        link = (f"{one['link_bytes_per_step'] / 1e6:.2f}" for one in (flat, two))
        step = (f"{one['step_ms']['median']:.0f}" for one in (flat, two))
        rows.append(
            (
                f"{name}, {schedule}",
                f"{share:.1f} %",
                f"{saved[name, schedule]:.1f} %",
                f"{', '.join(link)} MB",
                f"{', '.join(step)} ms",
                "yes" if flat["equals_serial"] and two["equals_serial"] else "no",
            )
        )
    head = (
        "",
        "rows that both ranks of a host read",
        "saved on the link",
        "link: flat, two-level",
        "step: flat, two-level",
        "bits of serial",
    )
    return format_table(used, folder, head, rows, note=format_verdict(used))
