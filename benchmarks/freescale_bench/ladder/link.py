"""How long the bytes of a step take on the link: what no schedule goes below."""

from __future__ import annotations

from typing import Any

from freescale_bench.common.results import Row


def add_link_time(rows: list[Row], rate: str) -> None:
    """Sets `link_ms` of each row: the bytes that a rank sends per step over `rate` (such as
    200mbit). Links are full duplex, and ranks send about equally much."""
    bits_per_ms = 1e3 * int(rate.removesuffix("mbit"))
    for row in rows:
        sent = sum(row["bytes_per_step"].values()) / row["ranks"]
        row["link_ms"] = round(8 * sent / bits_per_ms, 2)


def describe_link(rows: Any, tick: str, peer: str, ours: str) -> str:
    """Describes the link time of two rows in a sentence; empty if it is unknown."""
    if "link_ms" not in rows.get(peer, {}) or "link_ms" not in rows[ours]:
        return ""
    parts = (
        f"{rows[arm]['link_ms']:.0f} ms of the {rows[arm]['step_ms']['median']:.0f} of a step"
        for arm in (peer, ours)
    )
    theirs, own = parts
    return (
        f" At the rate of the link the bytes of a rank take {theirs} with TorchRec's SparseDist, "
        f"and {own} with {tick}{ours}{tick}."
    )
