"""The ladder as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freescale_bench.common.markdown import (
    Results,
    capitalize,
    format_known,
    format_table,
    single,
)
from freescale_bench.ladder.figure import (
    choose_parity,
    describe_conditions,
    find_median,
    find_peer,
)
from freescale_bench.ladder.rungs import DEFAULTS, PRODUCT, explain_rungs

_WORKLOADS = {
    "paper": "Long histories",
    "short": "Short histories, `freescale train` itself",
    "train": "Long histories, `freescale train` itself",
}


def title_ladder(used: Results) -> str:
    """Returns the heading: workload and ranks."""
    (name,) = used
    _, workload, *_ = name.split("-")
    result = single(used)
    ranks = result["rows"][0].get("ranks") or 2
    where = (
        f"{ranks} ranks sharing one GPU (stress test)" if result["machine"]["gpu"] else "two hosts"
    )
    return f"{_WORKLOADS[workload]}: {where}"


def _conclude(rows: Sequence[Mapping[str, Any]], base: float) -> str:
    """States the speed of the defaults and of the fastest rung over TorchRec's."""
    rates = {
        row["arm"]: row["samples_per_second"]["median"] / base
        for row in rows
        if not row["arm"].startswith("TorchRec")
    }
    default = next((arm for arm in (PRODUCT, DEFAULTS) if arm in rates), None)
    best = max(rates, key=rates.__getitem__)
    fastest = f"the fastest rung ({best}) {rates[best]:.2f} times as fast"
    if default is None:
        return f"{capitalize(fastest)} as TorchRec's SparseDist."
    own = f"With its defaults FreeScale is {rates[default]:.2f} times as fast as TorchRec's"
    return f"{own} SparseDist{'' if best == default else f', {fastest}'}."


def format_ladder(used: Results, folder: str) -> str:
    """Formats TorchRec's arms, then ours, and marks rungs slower than TorchRec."""
    result = single(used)
    peer = find_peer(result["rows"])
    assert peer is not None, "a ladder has at least one TorchRec arm"
    base = peer["samples_per_second"]["median"]
    steps = choose_parity(result)
    rows = []
    for row in result["rows"]:
        times = row["samples_per_second"]["median"] / base
        ours = not row["arm"].startswith("TorchRec")
        slower = ", slower than TorchRec" if times < 1 and ours else ""
        rows.append(
            (
                row["arm"],
                f"{row['samples_per_second']['median']:.0f}",
                f"{times:.2f} x{slower}",
                format_known(find_median(row, "exposed_embedding_ms"), "ms", 0),
                format_known(find_median(row, "exposed_all_ms"), "ms", 0),
                format_known(find_median(row, "straggler_percent"), "%", 1),
                f"{row[f'{steps}_relative_loss_difference_to_serial']:.0e}".replace("0e+00", "0"),
            )
        )
    head = (
        "arm",
        "samples/s",
        f"over {peer['arm'].removeprefix('TorchRec TrainPipeline')}",
        "exposed ids, rows, gradients",
        "exposed, all",
        "straggler",
        "first loss, off serial's" if steps == "first_step" else "loss, off serial's",
    )
    targets = [
        f"{entry['claim']}: {entry['measured']:.3g} {entry['unit']} (target {entry['asked']:g})"
        for entry in result["claims"]
        if not entry["holds"]
    ]
    missed = f"\n\n**Targets missed.** {'; '.join(targets)}." if targets else ""
    where = f"{capitalize(describe_conditions(result))}; medians, arms in turn."
    note = explain_rungs(result, "`")
    table = format_table(used, folder, head, rows, note=note, conditions=where)
    return f"{_conclude(result['rows'], base)}\n\n{table}{missed}"
