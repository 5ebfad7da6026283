"""Tables in the terminal."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

COLUMNS = ("kernel", "ms", "rate", "of ceiling", "plain ms", "faster")
LEAST_WIDTH = 110  # of a table that goes to no terminal


def format_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A measured row as text, column by column; empty where nothing was measured."""

    def show(name: str, text: Callable[[Any], str]) -> str:
        return text(row[name]) if name in row else ""

    return (
        row["case"],
        show("ms", lambda ms: f"{ms['median']:.4f}"),
        show("rate", lambda rate: f"{rate:,.2f} {row['unit']}"),
        show("ceiling_percent", lambda percent: f"{percent:.1f} %"),
        show("plain_ms", lambda ms: f"{ms['median']:.3f}"),
        show("faster", lambda factor: f"{factor:.1f}x"),
    )


def format_line(parts: Sequence[str]) -> str:
    """A row of the plain table."""
    widths = (9, 16, 10, 10, 8)
    return f"{parts[0]:58s}" + "".join(
        f" {part:>{width}s}" for part, width in zip(parts[1:], widths, strict=True)
    )


def show_table(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    columns: Sequence[str] = COLUMNS,
    as_cells: Callable[[Mapping[str, Any]], Sequence[str]] = format_cells,
) -> None:
    """With rich where it is installed, else in plain lines."""
    if importlib.util.find_spec("rich") is None:
        print(title, format_line(columns), *(format_line(as_cells(row)) for row in rows), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, LEAST_WIDTH)
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0], min_width=24, overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before["group"] != row["group"]:
            table.add_section()
        table.add_row(*as_cells(row))
    console.print(table)
