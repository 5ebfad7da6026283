"""The last lines of a simulation: how much faster than TorchRec, and what limits the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# The base of every comparison: TorchRec's pipeline with its defaults, row-wise tables and no
# deduplication of ids (the peer of `freescale bench ladder`).
BASE = "TorchRec SparseDist"
ALL, UNBALANCED = "staged + balancing + hostwire", "staged + hostwire"
GIVEN = "as given"  # a single configuration
_BASE_NAME = "TorchRec's SparseDist"

LIMIT = 10.0  # percent of a step; above, something other than compute limits it
BATCH = "twice the batch"  # the only change that is not one of the machine


def write_verdict(
    rows: Mapping[str, Mapping[str, Any]], changes: Sequence[Mapping[str, Any]], gpu: str
) -> str:
    """States the speedup over TorchRec, the gain of balancing, and what limits the step. `rows`:
    figures of each technique; `changes`: gains of better machines, for the same GPUs."""
    name = ALL if ALL in rows else GIVEN
    best, base = rows[name], rows[BASE]
    count = best["gpus"]
    if count == 1:
        return (
            f"One {gpu} has nobody to wait for: a step takes {best['step_ms']:,.1f} ms, "
            f"{best['samples_per_second']:,.0f} samples a second."
        )
    subject = "FreeScale trains this" if name == ALL else "this configuration trains"
    faster = _divide(best, base)
    text = f"On {count:,} {gpu}s {subject} {faster:.2f} times as fast as {_BASE_NAME}"
    unbalanced = rows.get(UNBALANCED)
    if unbalanced is not None:
        without, straggling = _divide(unbalanced, base), unbalanced["straggler_percent"]
        if without < 0.99 * faster:
            text += f"; without balancing {without:.2f} times: stragglers cost {straggling:.0f} %"
        else:
            text += "; balancing adds nothing here: the ranks have equal work"
    return f"{text}. {_name_limit(best, [c for c in changes if c['arm'] == name])}"


def _divide(row: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    return float(row["samples_per_second"] / base["samples_per_second"])


def _name_limit(row: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> str:
    """Names the limit of a step, and what a better machine would change."""
    exposed, straggler = row["exposed_percent"], row["straggler_percent"]
    gains = {
        change["change"]: change["more_samples_per_second_percent"]
        for change in changes
        if change["change"] != BATCH
    }
    part, gain = max(gains.items(), key=lambda one: one[1], default=("", 0.0))
    if exposed >= max(LIMIT, straggler):
        kinds = row["exposed_ms"]
        kind = max(kinds, key=lambda one: float(kinds[one]))
        text = f"What limits it is communication, {exposed:.0f} % of the step, most of it {kind}"
        return f"{text}: {part} would give {gain:.1f} % more." if gain >= 1 else f"{text}."
    if straggler >= LIMIT:
        return f"What limits it is the slowest rank: the others wait {straggler:.0f} % of the step."
    text = f"What limits it is compute, {100 - exposed - straggler:.0f} % of the step"
    if gain >= 1:
        return f"{text}; {part} would give {gain:.1f} % more."
    return f"{text}: no faster network would give 1 % more." if gains else f"{text}."
