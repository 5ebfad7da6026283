"""The tables of the pages about one technique, and all tables of the documents by name
(`TABLES`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freescale.bench.common.markdown import (
    Results,
    Table,
    balance,
    ladder,
    lines,
    number,
    quality,
    serial,
    sources,
)

MEASURED = (
    "balance-measured-2ranks-cpu",
    "balance-measured-4ranks-h200",
    "balance-measured-8ranks-h200",
)


def claims(used: Results, folder: str) -> str:
    """What was asked of a benchmark, and what its last run found."""
    (result,) = used.values()
    rows = [
        (
            entry["claim"],
            f"{number(entry['asked'])} {entry['unit']}".strip(),
            f"{number(entry['measured'], 4)} {entry['unit']}".strip(),
            "holds" if entry["holds"] else "**does not hold**",
        )
        for entry in result["claims"]
    ]
    return f"{lines(('', 'asked', 'found', ''), rows)}\n\n*{sources(used, folder)}*"


def verdict(used: Results) -> str:
    """Of all claims together."""
    missed = [
        f"{name}: {entry['claim']}"
        for name, result in used.items()
        for entry in result["claims"]
        if not entry["holds"]
    ]
    return f"Missed: {'; '.join(missed)}." if missed else "All that was asked holds."


def balance_cost(used: Results, folder: str) -> str:
    """What balancing itself takes, and what it leaves: of each run's arms none, greedy, local and
    adapted."""
    rows = []
    for result in used.values():
        by = {row["arm"]: row for row in result["rows"]}
        arms = [by[name] for name in ("none", "greedy", "local", "adapted")]
        kind = "GPU ranks" if result["machine"]["gpu"] else "CPU ranks"
        (off,) = [
            entry["measured"]
            for entry in result["claims"]
            if "predicted against measured" in entry["claim"]
        ]
        memory = (
            ""
            if "gpu_peak_bytes_per_rank" not in by["none"]
            else _gigabytes(by["none"], by["greedy"])
        )
        rows.append(
            (
                f"{by['none']['ranks']} {kind}",
                ", ".join(f"{row['balancing_percent']:.2f}" for row in arms[1:]) + " %",
                ", ".join(f"{row['imbalance']:.2f}" for row in arms),
                f"{off:.1f} %",
                memory,
            )
        )
    head = (
        "",
        "own time: greedy, local, adapted",
        "imbalance of compute: none, greedy, local, adapted",
        "adapted: predicted off measured time of a rank",
        "largest peak on the GPU: none, greedy",
    )
    asked = (
        "Asked: own time at most 1 % of the step, predicted times at most 5 % off the "
        "measured ones (median, after 50 steps)."
    )
    return f"{lines(head, rows)}\n\n{asked} {verdict(used)}\n\n*{sources(used, folder)}*"


def _gigabytes(*rows: Mapping[str, Any]) -> str:
    return ", ".join(f"{max(row['gpu_peak_bytes_per_rank']) / 1e9:.1f}" for row in rows) + " GB"


def balance_bound(used: Results, folder: str) -> str:
    """How far above the lower bound a partitioner's largest load ends in its worst configuration,
    by samples a rank."""
    (result,) = used.values()
    batches = sorted({row["batch"] for row in result["rows"]})
    found: dict[str, dict[int, float]] = {}
    for row in result["rows"]:
        worst = found.setdefault(row["arm"], dict.fromkeys(batches, 0.0))
        worst[row["batch"]] = max(worst[row["batch"]], row["above_bound_percent"])
    rows = [(arm, *(f"{worst[batch]:.1f} %" for batch in batches)) for arm, worst in found.items()]
    head = (
        "largest load above the bound, worst configuration",
        *(f"{batch} samples a rank" for batch in batches),
    )
    return f"{lines(head, rows)}\n\n*Predicted. {sources(used, folder)}*"


def packing(used: Results, folder: str) -> str:
    """What a balanced step packs and unpacks on the host."""
    (result,) = used.values()
    rows = [
        (
            (
                f"{row['samples']} samples of up to {row['maximum_length']:,} events, "
                f"{row['ranks']} "
                "ranks"
            ),
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['pack_ms']['median']:.1f} ms",
            f"{row['unpack_ms']['median']:.1f} ms",
        )
        for row in result["rows"]
    ]
    return (
        f"{lines(('a rank', 'its message', 'packing', 'unpacking'), rows)}\n\n*One core; "
        f"medians. {sources(used, folder)}*"
    )


def hostwire(used: Results, folder: str) -> str:
    (result,) = used.values()
    rows = [
        (
            row["arm"],
            f"{row['alone_ms']['median']:.1f} ms",
            f"{row['behind_ms']['median']:.1f} ms",
            f"{row['behind_over_alone']:.2f} x",
        )
        for row in result["rows"]
    ]
    return f"{lines(('', 'alone', 'behind the bulk', ''), rows)}\n\n*{sources(used, folder)}*"


def staged(used: Results, folder: str) -> str:
    """Samples/s and exposed communication of each configuration of the two hosts."""
    (result,) = used.values()
    timed = [row for row in result["rows"] if "samples_per_second" in row]
    arms = ("serial", "TorchRec TrainPipelineSparseDist", "staged")
    rows = []
    for name in dict.fromkeys(row["configuration"] for row in timed):
        by = {row["arm"]: row for row in timed if row["configuration"] == name}
        rate = {arm: by[arm]["samples_per_second"]["median"] for arm in arms}
        exposed = {arm: by[arm]["exposed_embedding_ms"]["median"] for arm in arms}
        hand = [row["samples_per_second"]["median"] for arm, row in by.items() if "by hand" in arm]
        torchrec = f"{rate[arms[1]]:.0f}" + "".join(
            f" ({value:.0f} with ids deduplicated by hand)" for value in hand
        )
        rows.append(
            (
                name,
                f"{rate['serial']:.0f}, {torchrec}, {rate['staged']:.0f}",
                f"{rate['staged'] / rate[arms[1]]:.2f} x",
                ", ".join(f"{exposed[arm]:.1f}" for arm in arms) + " ms",
                f"{100 * exposed['staged'] / exposed['serial']:.1f} %",
            )
        )
    head = (
        "",
        "samples/s: serial, TorchRec, staged",
        "staged over TorchRec",
        "exposed ids, rows, gradients",
        "staged of serial's",
    )
    return f"{lines(head, rows)}\n\n*{sources(used, folder)}*"


def staged_gpu(used: Results, folder: str) -> str:
    (result,) = used.values()
    rows = [
        (
            row["arm"],
            f"{row['step_ms']['median']:.1f} ms",
            f"{row['exposed_embedding_ms']['median']:.2f} ms",
            f"{row['waited_for_lanes_ms']['median']:.2f} ms" if row["arm"] != "serial" else "",
            "yes" if row["arm"] == "serial" or row["losses_equal_serial"] else "no",
        )
        for row in result["rows"]
    ]
    head = (
        "",
        "step",
        "exposed ids, rows, gradients",
        "the main thread waits for lanes",
        "losses equal serial's in every bit",
    )
    return f"{lines(head, rows)}\n\n{verdict(used)}\n\n*{sources(used, folder)}*"


def ablation(used: Results, folder: str) -> str:
    """What each technique would give on 256 GPUs."""
    (result,) = used.values()
    found = [row for row in result["rows"] if row["figure"] == "by GPUs" and row["gpus"] == 256]
    step = {row["arm"]: row["step_ms"] for row in found}
    rows = [
        (
            row["arm"],
            f"{step[row['arm']]:,.0f} ms",
            f"{row['straggler_percent']:.1f} %",
            f"{sum(row['exposed_ms'].values()):.1f} ms",
            f"{step['none'] / step[row['arm']]:.2f} x",
        )
        for row in found
    ]
    return (
        f"{lines(('', 'step', 'straggler', 'exposed', 'speed-up'), rows)}\n\n*Predicted. "
        f"{sources(used, folder)}*"
    )


def validation(used: Results, folder: str) -> str:
    """Rows within what was asked of the simulator, by testbed and model; without those that a curve
    was taken from."""
    (result,) = used.values()
    kinds = {
        "A: 2 hosts, 200 Mbit/s, MLP": lambda row: (
            row["testbed"] == "A" and "ranks" not in row["configuration"]
        ),
        "A: 2 CPU ranks, HSTU": lambda row: (
            row["testbed"] == "A" and "ranks" in row["configuration"]
        ),
        "C: 4 and 8 ranks on one H200, HSTU": lambda row: (
            row["testbed"] == "C" and not _is_mlp(row)
        ),
        "C: 4 ranks on one H200, MLP, over hostwire": lambda row: (
            row["testbed"] == "C" and _is_mlp(row)
        ),
    }
    rows = []
    for name, chosen in kinds.items():
        blind = [row for row in result["rows"] if chosen(row) and not row["fitted"]]
        cells = [_within(blind, key, limit, unit) for key, limit, unit in _ASKED]
        rows.append((name, str(len(blind)), *cells))
    head = (
        "testbed",
        "rows",
        "step within 10 %",
        "straggler within 2 points",
        ("exposed within 2 points"),
    )
    return f"{lines(head, rows)}\n\n*{sources(used, folder)}*"


_ASKED = (
    ("step_error_percent", 10.0, " %"),
    ("straggler_points", 2.0, ""),
    ("exposed_points", 2.0, ""),
)


def _is_mlp(row: Mapping[str, Any]) -> bool:
    """Of the staged benchmark on GPU ranks, which earlier results call `priority`."""
    return row["configuration"].startswith(("staged-", "priority-"))


def _within(rows: Sequence[Mapping[str, Any]], key: str, limit: float, unit: str) -> str:
    worst = max((row[key] for row in rows), key=abs)
    return f"{sum(abs(row[key]) <= limit for row in rows)} (worst {worst:+.1f}{unit})"


TABLES: dict[str, tuple[Sequence[str], Table]] = {
    "ladder-paper-hosts": (("ladder-paper-hosts",), ladder),
    "serial": (("serial-cpu",), serial),
    "quality": (("quality-cpu",), quality),
    "packing": (("packing-cpu",), packing),
    "balance": (MEASURED, balance),
    "balance-cost": (MEASURED, balance_cost),
    "balance-bound": (("balance-cpu",), balance_bound),
    "hostwire": (("hostwire-hosts",), hostwire),
    "overlap-claims": (("overlap-4ranks-h200",), claims),
    "staged": (("staged-hosts",), staged),
    "staged-gpu": (("staged-4ranks-h200",), staged_gpu),
    "simulate-claims": (("simulate-paper",), claims),
    "simulate-ablation": (("simulate-paper",), ablation),
    "simulate-validation": (("simulate-validation",), validation),
}
