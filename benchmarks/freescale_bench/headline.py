"""The table on the first screen: what FreeScale makes of several machines, a row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freescale_bench.common.markdown import Results, format_rows
from freescale_bench.ladder.rungs import FULL, PRODUCT

FILES = (
    "ladder-paper-hosts",
    "ladder-train-4ranks-h200",
    "ladder-train-8ranks-h200",
    "train-h200",
    "quality-together-h200",
    "quality-cpu",
)


def format_headline(used: Results, folder: str) -> str:
    """Six rows: three of speed against TorchRec, one of a single GPU, two of quality."""
    hosts, four, eight, train, recipes, quality = (used[name] for name in FILES)
    long = next(row for row in train["rows"] if row.get("shape") == "long")
    rows = [
        ("2 CPU ranks, 200 Mbit/s between them", *_compare(hosts, FULL)),
        ("4 ranks sharing one H200, `freescale train`", *_compare(four, PRODUCT)),
        ("8 ranks sharing one H200, `freescale train`", *_compare(eight, PRODUCT)),
        (
            f"one H200, {long['samples']} histories of {long['tokens'] / long['samples']:,.0f} "
            f"events on average, width {long['width']}, {long['layers']} layers",
            f"{long['step_ms']['median']:.0f} ms a step, {long['tflop_per_s']:.0f} TFLOP/s",
            "",
            f"device busy {long['device_busy_percent']:.0f} % of the time",
        ),
        _compare_recipes(recipes),
        (
            f"Online Retail II, defaults of {quality['date'][:10]}, HR@10",
            *_compare_quality(quality),
        ),
    ]
    head = ("", "FreeScale", "compared with", "")
    links = ", ".join(f"[{name}]({folder}/{name}.json)" for name in used)
    return f"{format_rows(head, rows)}\n\n*Raw data: {links}.*"


def _compare(result: Mapping[str, Any], arm: str) -> tuple[str, str, str]:
    rates = {row["arm"]: row["samples_per_second"]["median"] for row in result["rows"]}
    ours, theirs = rates[arm], rates["TorchRec TrainPipelineSparseDist"]
    return (
        f"{ours:,.0f} samples/s",
        f"TorchRec SparseDist: {theirs:,.0f} samples/s",
        f"{ours / theirs:.2f} times faster",
    )


def _compare_recipes(result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    differences = [row["percent"] for row in result["rows"]]
    data = {row["data"] for row in result["rows"]}
    mean = sum(differences) / len(differences)
    return (
        f"`--recipe hstu-small` and `hstu-large`, HR@10 and NDCG@10 on {len(data)} data sets",
        f"{mean:+.1f} % in the mean",
        "the public HSTU",
        f"{min(differences):+.1f} to {max(differences):+.1f} %",
    )


def _compare_quality(result: Mapping[str, Any]) -> tuple[str, str, str]:
    ours, popularity = (row["hr@10"]["mean"] for row in result["rows"])
    times = f"{ours / popularity:.1f} times as many hits"
    return f"{ours:.3f}", f"popularity baseline: {popularity:.3f}", times
