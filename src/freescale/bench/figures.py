"""Every figure and every measured table of the documentation, from the files in benchmarks/results.

    .venv/bin/python benchmarks/figures.py             # draws docs/figures/*.svg, fills the marked parts of README.md and docs/*.md
    .venv/bin/python benchmarks/figures.py --check     # says what would change, and changes nothing; status 1 if something would

A figure whose results are missing is left out, with a message; it is drawn when they are there. In
the documents, what stands between `<!-- measured:NAME -->` and `<!-- /measured -->` is made here:
do not edit it. Pictures of a run (docs/figures/staged-trace.svg, serial_step.svg) need the run:
figure_staged.py and figure_step.py draw them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.bench import tables as technique_tables
from freescale.bench.balance import figure as figure_balance
from freescale.bench.common import markdown as tables
from freescale.bench.common.drawing import origin
from freescale.bench.kernels import figure as figure_kernels
from freescale.bench.ladder import figure as figure_ladder
from freescale.bench.overlap import figure as figure_overlap
from freescale.bench.simulate import figure as figure_simulate
from freescale.bench.staged import figure as figure_staged
from freescale.bench.workload import figure as figure_workload

ROOT = Path(__file__).resolve().parents[3]
RESULTS, FIGURES, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures", ROOT / "docs"
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """`files`: the results it is made of, by name. With `each`, one pattern, and a picture for
    every file that fits it."""

    name: str
    about: str  # what it shows: the picture's text in the documents
    files: Sequence[str]
    draw: Callable[[Results], str]
    each: bool = False
    # to stand above the picture, and to say where the numbers are from
    table: tables.Table | None = None


PICTURES = (
    Figure(
        "workload",
        "Sparsity and straggler % over history cap, batch and ranks",
        ("workload-cpu",),
        figure_workload.shape,
    ),
    Figure(
        "collisions",
        "Collision % over ranks, catalogue and lengths",
        ("workload-cpu",),
        figure_workload.collisions,
    ),
    Figure(
        "kernel-ranks",
        "Time of dispatch and combine over ranks",
        ("kernels-h200",),
        figure_kernels.over_ranks,
    ),
    Figure(
        "kernels",
        "Share of the GPU that each kernel reaches",
        ("kernels-h200",),
        figure_kernels.shares,
    ),
    Figure(
        "straggler",
        "Straggler % with and without balancing",
        (
            "balance-measured-2ranks-cpu",
            "balance-measured-4ranks-h200",
            "balance-measured-8ranks-h200",
            "balance-cpu",
            "simulate-paper",
        ),
        figure_balance.straggler,
    ),
    Figure(
        "exposed",
        "Exposed communication over collision rate and history length",
        ("staged-hosts", "simulate-paper"),
        figure_staged.exposed,
    ),
    Figure(
        "staged",
        "Exposed communication and samples/s over the collision rate",
        ("staged-hosts",),
        figure_staged.curve,
    ),
    Figure(
        "overlap", "Compute beside communication", ("overlap-4ranks-h200",), figure_overlap.beside
    ),
    Figure(
        "ladder",
        "Samples/s, waits and losses, rung by rung",
        ("ladder-*",),
        figure_ladder.ladder,
        each=True,
        table=tables.ladder,
    ),
    Figure("simulate", "Predicted to 4,096 GPUs", ("simulate-paper",), figure_simulate.picture),
)


def read(name: str, results: Path) -> dict[str, Any]:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def missing(figure: Figure, results: Path) -> list[str]:
    return [name for name in figure.files if not list(results.glob(f"{name}.json"))]


def drawn(figure: Figure, results: Path) -> dict[str, tuple[str, Results]]:
    """By the picture's name: the picture, and the results that it is made of."""
    if figure.each:
        names = sorted(path.stem for path in results.glob(f"{figure.files[0]}.json"))
        return {
            name: (figure.draw(used), used)
            for name in names
            for used in ({name: read(name, results)},)
        }
    used = {name: read(name, results) for name in figure.files}
    return {figure.name: (figure.draw(used), used)}


def shown(figure: Figure, name: str, used: Results, depth: str) -> str:
    """The picture in a document, and where its numbers are from. `depth`: from the document to the
    root."""
    image = f"![{figure.about}]({'' if depth else 'docs/'}figures/{name}.svg)"
    if figure.table:
        return f"### {name}\n\n{figure.table(used, f'{depth}benchmarks/results')}\n\n{image}"
    lines = [image, ""]
    for raw, result in used.items():
        link = f"[{raw}.json]({depth}benchmarks/results/{raw}.json)"
        lines.append(f"- {link}: {origin(result)}: `{result['command']}`")
    return "\n".join(lines)


def everything(results: Path) -> tuple[dict[Path, str], dict[str, Callable[[str], str]], list[str]]:
    """(files of pictures, parts of documents by name, what is left out). A part is made for its
    document: links depend on where that lies."""
    pictures: dict[Path, str] = {}
    parts: dict[str, Callable[[str], str]] = {}
    left_out: list[str] = []
    for figure in PICTURES:
        if absent := missing(figure, results):
            why = (
                f"{figure.name}: left out, no {', '.join(f'{name}.json' for name in absent)} in "
                f"{results.name}"
            )
            left_out.append(why)
            parts[f"figure-{figure.name}"] = lambda depth, why=why: (
                f"*Not measured yet ({why.partition(': ')[2]}).*"
            )  # type: ignore[misc]
            continue
        made = drawn(figure, results)
        pictures |= {FIGURES / f"{name}.svg": picture for name, (picture, _) in made.items()}

        def part(depth: str, figure: Figure = figure, made: Mapping = made) -> str:
            return "\n\n".join(shown(figure, name, used, depth) for name, (_, used) in made.items())

        parts[f"figure-{figure.name}"] = part
    for name, (files, table) in technique_tables.TABLES.items():
        if absent := [file for file in files if not (results / f"{file}.json").exists()]:
            left_out.append(
                f"table {name}: left out, no "
                f"{', '.join(f'{one}.json' for one in absent)} in {results.name}"
            )
            continue
        used = {file: read(file, results) for file in files}
        parts[name] = lambda depth, used=used, table=table: table(
            used, f"{depth}benchmarks/results"
        )  # type: ignore[misc]
    whole = {path.stem: read(path.stem, results) for path in sorted(results.glob("*.json"))}
    parts["failed"] = lambda depth: tables.failed(whole, f"{depth}benchmarks/results")
    return pictures, parts, left_out


_MARKED = re.compile(r"(<!-- measured:([\w-]+) -->\n)(?:.*?\n)??(<!-- /measured -->)", re.DOTALL)


def filled(document: str, parts: Mapping[str, Callable[[str], str]], depth: str) -> str:
    """The document with its marked parts made anew; one whose results are missing stays as it
    is."""

    def made(match: re.Match[str]) -> str:
        part = parts.get(match[2])
        return f"{match[1]}{part(depth)}\n{match[3]}" if part else match[0]

    return _MARKED.sub(made, document)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help=("change nothing; status 1 if something would")
    )
    options = parser.parse_args(arguments)
    pictures, parts, left_out = everything(RESULTS)
    wanted = dict(pictures)
    wanted[FIGURES / "balance.svg"] = figure_balance.picture(
        figure_balance.lengths_of(None, 128), 8
    )
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        wanted[path] = filled(
            path.read_text(encoding="utf-8"), parts, "" if path.parent == ROOT else "../"
        )
    changed = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in changed:
        print(f"{'would change' if options.check else 'written'}: {path.relative_to(ROOT)}")
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    print(*left_out, sep="\n", end="\n" if left_out else "")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
