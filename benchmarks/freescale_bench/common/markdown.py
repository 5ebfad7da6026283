"""Tables of the documentation, generated from results: their common shape, and tables that fit any
result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freescale_bench.common.drawing import describe_origin

Results = Mapping[str, Mapping[str, Any]]  # by file name, without .json
Table = Callable[[Results, str], str]  # (results, relative path to their folder)


def single(used: Results) -> Mapping[str, Any]:
    """Returns the only result."""
    (result,) = used.values()
    return result


def format_table(
    used: Results,
    folder: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    note: str = "",
    conditions: str = "",
) -> str:
    """The shape of every table: head, rows, a note, and the sources, folded away.

    Args:
        used: the results that the table shows.
        folder: their folder, relative to the document.
        conditions: of the measurement; printed before the sources.
    """
    where = f"*{conditions}*" if conditions else ""
    sources = fold("Raw data", format_sources(used, folder))
    return "\n\n".join(filter(None, [format_rows(head, rows), note, where, sources]))


def fold(summary: str, text: str) -> str:
    """Folds text away behind a click, on the site and on GitHub."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def format_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def format_sources(used: Results, folder: str) -> str:
    """One line per result: raw file, machine, date and command."""
    return "\n".join(
        f"- [{name}.json]({folder}/{name}.json): {describe_origin(result)}: `{result['command']}`"
        for name, result in used.items()
    )


def format_known(value: float | None, unit: str, digits: int) -> str:
    return "not recorded" if value is None else f"{value:.{digits}f} {unit}"


def format_number(value: float | Sequence[float], digits: int = 6) -> str:
    """Formats a number or an interval."""
    return (
        " to ".join(f"{edge:.{digits}g}" for edge in value)
        if isinstance(value, Sequence)
        else f"{value:.{digits}g}"
    )


def capitalize(text: str) -> str:
    """Capitalizes the first letter and keeps the rest."""
    return f"{text[0].upper()}{text[1:]}"


def format_claims(used: Results, folder: str) -> str:
    """Formats the targets of benchmarks, and the measured values."""
    rows = [
        (
            entry["claim"],
            f"{format_number(entry['asked'])} {entry['unit']}".strip(),
            f"{format_number(entry['measured'], 4)} {entry['unit']}".strip(),
            "met" if entry["holds"] else "**missed**",
        )
        for _, entry in _list_claims(used)
    ]
    return format_table(used, folder, ("", "target", "measured", ""), rows)


def _list_claims(used: Results, missed: bool = False) -> list[tuple[str, Mapping[str, Any]]]:
    """(result, claim) of all claims, or of those that were missed."""
    claims = [(name, entry) for name, result in used.items() for entry in result["claims"]]
    return [(name, entry) for name, entry in claims if not (missed and entry["holds"])]


def format_verdict(used: Results) -> str:
    """Summarizes all claims in a sentence."""
    missed = [f"{name}: {entry['claim']}" for name, entry in _list_claims(used, missed=True)]
    return f"Targets missed: {'; '.join(missed)}." if missed else "All targets are met."


def format_missed(used: Results, folder: str) -> str:
    """Formats every missed target of all results."""
    rows = [
        (
            entry["claim"],
            f"{entry['asked']:g} {entry['unit']}",
            f"{format_number(entry['measured'])} {entry['unit']}",
            f"[{name}]({folder}/{name}.json)",
        )
        for name, entry in _list_claims(used, missed=True)
    ]
    table = format_rows(("", "target", "measured", "raw data"), rows)
    return f"{table}\n\n*{len(rows)} of {len(_list_claims(used))} targets; the others are met.*"
