"""The measured tables of the documents, from results. Each is a function of them and of where they
lie, for links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freescale.bench.common.drawing import origin
from freescale.bench.ladder.figure import conditions, of, peer_of
from freescale.bench.ladder.rungs import about

Results = Mapping[str, Mapping[str, Any]]
Table = Callable[[Results, str], str]
TICK = "`"


def lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def sources(used: Results, folder: str) -> str:
    """Raw file, machine, commit, date, command."""
    return "; ".join(
        f"[{name}.json]({folder}/{name}.json): {origin(result)}, `{result['command']}`"
        for name, result in used.items()
    )


def known(value: float | None, unit: str, digits: int) -> str:
    return "not seen" if value is None else f"{value:.{digits}f} {unit}"


def ladder(used: Results, folder: str) -> str:
    """TorchRec, then a technique more on each rung; who is slower than TorchRec is said to be."""
    (result,) = used.values()
    peer = peer_of(result["rows"])
    assert peer is not None, "the ladder has an arm of TorchRec's"
    base = peer["samples_per_second"]["median"]
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
                known(of(row, "exposed_embedding_ms"), "ms", 0),
                known(of(row, "exposed_all_ms"), "ms", 0),
                known(of(row, "straggler_percent"), "%", 1),
                f"{row['largest_relative_loss_difference_to_serial']:.0e}".replace("0e+00", "0"),
            )
        )
    name = peer["arm"].removeprefix("TorchRec TrainPipeline")
    head = (
        "",
        "samples/s",
        f"of {name}",
        "exposed ids, rows, gradients",
        "exposed, all",
        "straggler",
        "loss, off serial's",
    )
    asked = [
        f"{entry['claim']}: {entry['measured']:.3g} {entry['unit']} ({entry['asked']:g} asked)"
        for entry in result["claims"]
        if not entry["holds"]
    ]
    missed = f"\n\n**Asked of it and missed.** {'; '.join(asked)}." if asked else ""
    where = conditions(result)
    source = f"*{where[0].upper()}{where[1:]}; medians, arms in turn. {sources(used, folder)}*"
    return f"{lines(head, rows)}\n\n{about(result, TICK)}\n\n{source}{missed}"


def serial(used: Results, folder: str) -> str:
    (result,) = used.values()
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
    return (
        f"{lines(head, rows)}\n\n*{result['method'][0].upper()}{result['method'][1:]}. "
        f"{sources(used, folder)}*"
    )


def quality(used: Results, folder: str) -> str:
    (result,) = used.values()
    names = [name for name in result["rows"][0] if name != "arm"]
    rows = [(row["arm"], *(f"{row[name]:.3f}" for name in names)) for row in result["rows"]]
    training = f"{result['training']['settings']}, {result['training']['steps']} steps"
    return (
        f"{lines(('', *names), rows)}\n\n*{result['dataset']['name']}, {training}. "
        f"{sources(used, folder)}*"
    )


def balance(used: Results, folder: str) -> str:
    rows = []
    arms = ("none", "greedy", "local", "adapted")
    for result in used.values():
        by = {row["arm"]: row for row in result["rows"]}
        kind = (
            "GPU ranks sharing one H200"
            if result["machine"]["gpu"]
            else ("CPU ranks, a pinned core each")
        )
        cells = [
            f"{by[arm]['straggler_percent']:.1f} %, {by[arm]['step_ms']['median']:.0f} ms"
            for arm in arms
        ]
        rows.append((f"{by['none']['ranks']} {kind}", *cells))
    head = ("straggler %, step", "none", "greedy (default)", "local", "greedy, `--balance-adapt`")
    return f"{lines(head, rows)}\n\n*{sources(used, folder)}*"


def number(value: float | Sequence[float], digits: int = 6) -> str:
    """Or an interval."""
    return (
        " to ".join(f"{edge:.{digits}g}" for edge in value)
        if isinstance(value, Sequence)
        else f"{value:.{digits}g}"
    )


def failed(used: Results, folder: str) -> str:
    """Every claim that does not hold, of all results."""
    claims = [(name, entry) for name, result in used.items() for entry in result["claims"]]
    rows = [
        (
            entry["claim"],
            f"{entry['asked']:g} {entry['unit']}",
            f"{number(entry['measured'])} {entry['unit']}",
            f"[{name}]({folder}/{name}.json)",
        )
        for name, entry in claims
        if not entry["holds"]
    ]
    return (
        f"{lines(('', 'asked', 'found', 'raw'), rows)}\n\n*{len(rows)} of {len(claims)} "
        "claims; the others hold.*"
    )
