"""The tables of README's first screen: three numbers, and our defaults against TorchRec's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freescale_bench.common.markdown import Results, fold, format_rows, format_sources
from freescale_bench.ladder.rungs import DEFAULTS, PRODUCT, SPARSE_DIST

FILES = ("quality-together-h200", "train-h200", "ladder-paper-hosts")
# Rows of the table of defaults: (ranks, paper ladder, train ladder).
_PAIRS = (
    ("2 hosts, 200 Mbit/s", "ladder-paper-hosts", "ladder-short-hosts"),
    ("4 ranks sharing one H200", "ladder-paper-4ranks-h200", "ladder-train-4ranks-h200"),
    ("8 ranks sharing one H200", "ladder-paper-8ranks-h200", "ladder-train-8ranks-h200"),
)
DEFAULTS_FILES = ("train-h200", *(name for _, *pair in _PAIRS for name in pair))


def format_headline(used: Results, folder: str) -> str:
    """Formats quality, the speed of one GPU, and the speed of two hosts."""
    recipes, train, hosts = (used[name] for name in FILES)
    rows = [
        _compare_recipes(recipes),
        _describe_gpu(train),
        ("two CPU hosts, 200 Mbit/s between them", *_compare(hosts, DEFAULTS)),
    ]
    head = ("measured on", "FreeScale", "compared with", "difference")
    sources = fold("Raw data", format_sources(used, folder))
    return f"{format_rows(head, rows)}\n\n{sources}"


def format_defaults(used: Results, folder: str) -> str:
    """Formats the defaults of `freescale train` next to TorchRec's, on the ladders with both."""
    rows = [
        (where, *_pair(used[paper], DEFAULTS), *_pair(used[train], PRODUCT))
        for where, paper, train in _PAIRS
    ]
    both = "FreeScale and TorchRec SparseDist, samples/s"
    head = ("ranks", f"paper ladder: {both}", "ratio", f"train ladder: {both}", "ratio")
    shapes = {row.get("shape"): row for row in used["train-h200"]["rows"]}
    alone = " and ".join(
        f"{row['tflop_per_s']:.0f} TFLOP/s on histories of "
        f"{row['tokens'] / row['samples']:,.0f} events (width {row['width']}, {row['layers']} "
        "layers)"
        for row in (shapes["medium"], shapes["long"])
    )
    note = f"One rank with the whole H200 reaches {alone}."
    sources = fold("Raw data", format_sources(used, folder))
    return f"{format_rows(head, rows)}\n\n{note}\n\n{sources}"


def _read_rates(result: Mapping[str, Any], arm: str) -> tuple[float, float]:
    rates = {row["arm"]: row["samples_per_second"]["median"] for row in result["rows"]}
    return rates[arm], rates[SPARSE_DIST]


def _pair(result: Mapping[str, Any], arm: str) -> tuple[str, str]:
    ours, theirs = _read_rates(result, arm)
    return f"{ours:,.0f} and {theirs:,.0f}", f"{ours / theirs:.2f}"


def _compare(result: Mapping[str, Any], arm: str) -> tuple[str, str, str]:
    ours, theirs = _read_rates(result, arm)
    return (
        f"{ours:,.0f} samples/s",
        f"TorchRec SparseDist: {theirs:,.0f} samples/s",
        f"{ours / theirs:.2f} times as fast",
    )


def _compare_recipes(result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    differences = [row["percent"] for row in result["rows"]]
    data = {row["data"] for row in result["rows"]}
    mean = sum(differences) / len(differences)
    return (
        f"{len(data)} data sets, HR@10 and NDCG@10",
        "recipes `hstu-small` and `hstu-large`",
        "the public HSTU",
        f"{mean:+.1f} % on average ({min(differences):+.1f} to {max(differences):+.1f} %)",
    )


def _describe_gpu(train: Mapping[str, Any]) -> tuple[str, str, str, str]:
    long = next(row for row in train["rows"] if row.get("shape") == "long")
    return (
        f"one H200, histories of {long['tokens'] / long['samples']:,.0f} events on average, "
        f"width {long['width']}, {long['layers']} layers",
        f"{long['tflop_per_s']:.0f} TFLOP/s, GPU busy {long['device_busy_percent']:.0f} % "
        "of the time",
        "not compared",
        "",
    )
