"""`freescale bench figures`: generates every figure and measured table of the documentation from
benchmarks/results. Draws docs/figures/*.svg and fills the marked parts of README.md and the pages
in docs. Needs the repository.

A figure without results is left out, with a message. Text between `<!-- measured:NAME -->` and
`<!-- /measured -->` in the documents is generated: do not edit it. docs/figures/staged-trace.svg is
drawn by staged/trace.py, from its own run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from freescale.report.glossary import read_glossary
from freescale_bench import headline
from freescale_bench.architecture import draw_architecture, draw_tables, read_layers
from freescale_bench.balance import figure as balance_figure
from freescale_bench.balance import table as balance_table
from freescale_bench.common.markdown import (
    Results,
    Table,
    fold,
    format_claims,
    format_missed,
    format_sources,
)
from freescale_bench.common.options import make_parser
from freescale_bench.common.repository import require_repository
from freescale_bench.common.results import read_result
from freescale_bench.dlrm.table import format_dlrm
from freescale_bench.exchange.table import format_exchange
from freescale_bench.faults import figure as faults_figure
from freescale_bench.faults.table import format_faults, format_restarts
from freescale_bench.features.table import format_features, format_preparation
from freescale_bench.host_tables.table import format_peer
from freescale_bench.kernels import figure as kernels_figure
from freescale_bench.kernels.table import format_kernels
from freescale_bench.ladder import figure as ladder_figure
from freescale_bench.ladder.table import format_ladder, title_ladder
from freescale_bench.overlap import figure as overlap_figure
from freescale_bench.quality.table import format_quality, format_recbole, format_recipes
from freescale_bench.simulate import figure as simulate_figure
from freescale_bench.simulate import table as simulate_table
from freescale_bench.staged import figure as staged_figure
from freescale_bench.staged.table import format_staged, format_staged_gpu
from freescale_bench.torchrec.table import format_torchrec
from freescale_bench.train.table import format_train

Part = Callable[[str], str]  # makes a part of a document, given its relative path to the root


@dataclass(frozen=True)
class Figure:
    """A picture of the documentation.

    Attributes:
        about: the picture's alternative text.
        files: names of its results.
        each: `files` is one pattern, and every matching file has its own picture.
        table: printed above the picture, with the sources.
    """

    name: str
    about: str
    files: Sequence[str]
    draw: Callable[[Results], str]
    each: bool = False
    table: Table | None = None


PICTURES = (
    Figure(
        "kernels",
        "Share of the GPU that each kernel reaches",
        ("kernels-h200",),
        kernels_figure.draw_shares,
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
        balance_figure.draw_straggler,
    ),
    Figure(
        "exposed",
        "Exposed communication over collision rate and history length",
        ("staged-hosts", "simulate-paper"),
        staged_figure.draw_exposed,
    ),
    Figure(
        "staged",
        "Exposed communication and samples/s over the collision rate",
        ("staged-hosts",),
        staged_figure.draw_curves,
    ),
    Figure(
        "overlap",
        "Compute during communication",
        ("overlap-4ranks-h200",),
        overlap_figure.draw_overlap,
    ),
    Figure(
        "ladder",
        "Samples/s, waits and losses, rung by rung",
        ("ladder-*",),
        ladder_figure.draw_ladder,
        each=True,
        table=format_ladder,
    ),
    Figure(
        "faults",
        "Steps of a run through ten faults: it falls back to the last checkpoint and goes on",
        ("faults-cpu",),
        faults_figure.draw_faults,
    ),
    Figure(
        "simulate", "Predicted to 4,096 GPUs", ("simulate-paper",), simulate_figure.draw_simulate
    ),
)

MEASURED = (
    "balance-measured-2ranks-cpu",
    "balance-measured-4ranks-h200",
    "balance-measured-8ranks-h200",
)
# By marker: names of the results, and the function that formats them.
TABLES: dict[str, tuple[Sequence[str], Table]] = {
    "headline": (headline.FILES, headline.format_headline),
    "defaults": (headline.DEFAULTS_FILES, headline.format_defaults),
    "ladder-paper-hosts": (("ladder-paper-hosts",), format_ladder),
    "quality": (("quality-cpu",), format_quality),
    "recipes": (("quality-*-*",), format_recipes),
    "recbole": (("quality-*-recbole-cpu",), format_recbole),
    "features": (
        ("features-beauty-*", "features-toys-*", "features-ml-100k-*"),
        format_features,
    ),
    "features-step": (("features-step-*",), format_claims),
    "features-preparation": (("features-preparation-cpu",), format_preparation),
    "store": (("store-cpu",), format_claims),
    "stream-deltas": (
        ("stream-deltas-*", "stream-freshness-*"),
        format_claims,
    ),
    "stores": (("stores-*",), format_claims),
    "dlrm": (("dlrm-*",), format_claims),
    "dlrm-step": (("dlrm-step-h200",), format_dlrm),
    "checkpoint-training": (("checkpoint-training-*",), format_claims),
    "snapshot": (("snapshot-*",), format_claims),
    "faults": (("faults-*",), format_faults),
    "restarts": (("faults-starts",), format_restarts),
    "balance": (MEASURED, balance_table.format_measured),
    "balance-cost": (MEASURED, balance_table.format_cost),
    "balance-bound": (("balance-cpu",), balance_table.format_bound),
    "split": (("split-*",), format_claims),
    "dynamic-batch": (("dynamic-h200",), format_claims),
    "dynamic-step": (("dynamic-4ranks-h200",), format_claims),
    "simulate-recovery": (("simulate-recovery-*",), format_claims),
    "host-tables": (("host_tables-h200",), format_claims),
    "host-tables-4": (("host_tables-4ranks-h200",), format_claims),
    "host-tables-torchrec": (("host_tables-torchrec-h200",), format_peer),
    "kernels": (("kernels-h200",), format_kernels),
    "recommend-append": (("recommend-append-*",), format_claims),
    "recommend-batch": (("recommend-batch-*",), format_claims),
    "recommend-parity": (("recommend-parity-*",), format_claims),
    "recommend-serve": (("recommend-serve-*",), format_claims),
    "update": (("update-*",), format_claims),
    "stream": (("stream-kills-*", "stream-soak-*", "stream-shift-*"), format_claims),
    "exchange": (("peer-exchange-cpu",), format_exchange),
    "overlap-claims": (("overlap-4ranks-h200",), format_claims),
    "staged": (("staged-hosts",), format_staged),
    "torchrec-parity": (("torchrec-parity-cpu",), format_claims),
    "torchrec": (("torchrec-speed-hosts",), format_torchrec),
    "torchrec-gpu": (("torchrec-speed-4ranks-h200",), format_torchrec),
    "staged-gpu": (("staged-4ranks-h200",), format_staged_gpu),
    "train": (("train-h200",), format_train),
    "simulate-claims": (("simulate-paper",), format_claims),
    "simulate-exchange": (("simulate-exchange",), simulate_table.format_exchange),
    "simulate-verdict": (("simulate-paper",), simulate_table.format_prediction),
    "simulate-ablation": (("simulate-paper",), simulate_table.format_ablation),
    "simulate-scaling": (("simulate-paper",), simulate_table.format_scaling),
    "simulate-sensitivity": (("simulate-paper",), simulate_table.format_sensitivity),
    "simulate-one-sample": (("simulate-paper",), simulate_table.format_one_sample),
    "simulate-validation": (("simulate-validation",), simulate_table.format_validation),
}


def find_missing(files: Sequence[str], results: Path) -> list[str]:
    return [f"{name}.json" for name in files if not list(results.glob(f"{name}.json"))]


def read_results(names: Sequence[str], results: Path) -> Results:
    """Reads results by name or pattern."""
    found = [path for name in names for path in sorted(results.glob(f"{name}.json"))]
    return {path.stem: read_result(path) for path in found}


def draw(figure: Figure, results: Path) -> dict[str, tuple[str, Results]]:
    """Draws the pictures of a figure. Returns (picture, results), by the picture's name."""
    if figure.each:
        names = sorted(path.stem for path in results.glob(f"{figure.files[0]}.json"))
        every = {name: read_results([name], results) for name in names}
    else:
        every = {figure.name: read_results(figure.files, results)}
    return {name: (figure.draw(used), used) for name, used in every.items()}


def show(figure: Figure, name: str, used: Results, depth: str) -> str:
    """Formats a picture and its sources for a document. `depth`: relative path from the document to
    the root."""
    folder = depth.removeprefix("../") if depth else "docs/"  # of the documents
    image = f"![{figure.about}]({folder}figures/{name}.svg)"
    if figure.table:
        table = figure.table(used, f"{depth}benchmarks/results")
        return f"### {title_ladder(used)}\n\n{table}\n\n{image}"
    return f"{image}\n\n{fold('Raw data', format_sources(used, f'{depth}benchmarks/results'))}"


def make_everything(results: Path) -> tuple[dict[str, str], dict[str, Part], list[str]]:
    """Returns (pictures by file name, parts of documents by marker, messages about what is left
    out)."""
    pictures: dict[str, str] = {}
    parts: dict[str, Part] = {}
    left_out: list[str] = []
    for figure in PICTURES:
        if absent := find_missing(figure.files, results):
            why = f"left out, no {', '.join(absent)} in {results.name}"
            left_out.append(f"{figure.name}: {why}")
            parts[f"figure-{figure.name}"] = partial(_say_missing, why)
            continue
        made = draw(figure, results)
        pictures |= {f"{name}.svg": picture for name, (picture, _) in made.items()}
        parts[f"figure-{figure.name}"] = partial(_show_all, figure, made)
    for name, (files, table) in TABLES.items():
        if absent := find_missing(files, results):
            left_out.append(f"table {name}: left out, no {', '.join(absent)} in {results.name}")
            continue
        parts[name] = partial(_show_table, table, read_results(files, results))
    whole = read_results(sorted(path.stem for path in results.glob("*.json")), results)
    parts["failed"] = partial(_show_table, format_missed, whole)
    return pictures, parts, left_out


def _say_missing(why: str, depth: str) -> str:
    return f"*Not measured yet ({why}).*"


def _show_all(figure: Figure, made: Mapping[str, tuple[str, Results]], depth: str) -> str:
    return "\n\n".join(show(figure, name, used, depth) for name, (_, used) in made.items())


def _show_table(table: Table, used: Results, depth: str) -> str:
    return table(used, f"{depth}benchmarks/results")


_MARKED = re.compile(r"(<!-- measured:([\w-]+) -->\n)(?:.*?\n)??(<!-- /measured -->)", re.DOTALL)


def fill(document: str, parts: Mapping[str, Part], depth: str) -> str:
    """Regenerates the marked parts of a document; parts without results stay unchanged."""

    def make(match: re.Match[str]) -> str:
        part = parts.get(match[2])
        return f"{match[1]}{part(depth)}\n{match[3]}" if part else match[0]

    return _MARKED.sub(make, document)


def find_documents(root: Path) -> list[tuple[Path, str]]:
    """Lists the pages that may have measured parts, and the relative path from each to the root."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [(page, "../" * (len(page.relative_to(root).parts) - 1)) for page in pages]


def render_glossary() -> str:
    """docs/glossary.md."""
    lines = [
        "# Glossary",
        "",
        "The terms of the documentation and the terminal. The [report](guide/report.md) shows",
        "these texts as tooltips.",
    ]
    section = ""
    for term in read_glossary():
        if term.section != section:
            section = term.section
            lines += ["", f"## {section}"]
        more = f" [More]({term.page})." if term.page else ""
        lines += ["", f'<a id="{term.slug}"></a>**{term.name}**: {term.text}{more}']
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("figures", __doc__, kept=False)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if anything would change"
    )
    options = parser.parse_args(arguments)
    root = require_repository()
    pictures, parts, left_out = make_everything(root / "benchmarks" / "results")
    figures = root / "docs" / "figures"
    wanted = {figures / name: picture for name, picture in pictures.items()}
    wanted[figures / "balance.svg"] = balance_figure.draw_balance(samples=128, ranks=8)
    wanted[figures / "architecture.svg"] = draw_architecture(read_layers(root))
    wanted[figures / "tables.svg"] = draw_tables()
    for path, depth in find_documents(root):
        wanted[path] = fill(path.read_text(encoding="utf-8"), parts, depth)
    wanted[root / "docs" / "glossary.md"] = render_glossary()  # whole, not by its marks
    changed = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in changed:
        print(f"{'would change' if options.check else 'written'}: {path.relative_to(root)}")
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    print(*left_out, sep="\n", end="\n" if left_out else "")
    return int(options.check and bool(changed))
