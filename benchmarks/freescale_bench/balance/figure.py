"""Balancing: predicted cost per rank before and after, and straggler % with and without.

The first figure uses log-normal lengths: median 3,000, sigma 1, cap 21,000.
"""

from __future__ import annotations

import numpy as np

from freescale.balance.cost import CostModel
from freescale.balance.partitioners.lookup import PARTITIONERS
from freescale.balance.problem import Problem, assign
from freescale_bench.common import drawing as svg
from freescale_bench.common.markdown import Results
from freescale_bench.common.workload import draw_lengths
from freescale_bench.simulate.figure import make_axes_over_lengths

WIDTH, LEFT, ROW, GAP = 250, 60, 16, 30
SHADES = ("#4c78a8", "#7a9cc6")  # neighbouring samples


def draw_panel(problem: Problem, name: str, x: float, y: float, largest: float) -> list[str]:
    """Draws a bar per rank, its samples side by side, most expensive first, and a line at the
    mean."""
    found = assign(problem, PARTITIONERS[name])
    share = 100 * found.moved_tokens / max(1, problem.tokens.sum())
    title = f"{name}: {found.straggler_percent:.1f} % straggler, {share:.0f} % of tokens moved"
    parts = [f'<text x="{x}" y="{y - 8}" {svg.TEXT}>{title}</text>']
    scale = WIDTH / largest
    for rank in range(problem.ranks):
        mine = np.sort(problem.costs[found.rank_of == rank])[::-1]
        left = x
        for place, cost in enumerate(mine):
            width = cost * scale
            top = y + rank * ROW
            parts.append(svg.rect(left, top, width, ROW - 3, SHADES[place % 2]))
            left += width
    mean = x + found.loads.mean() * scale
    bottom = y + problem.ranks * ROW
    parts.append(svg.rule(mean, y - 4, mean, bottom, "#e45756", more='stroke-width="1.5"'))
    return parts


def draw_balance(samples: int, ranks: int) -> str:
    """Draws the panels of four partitioners for log-normal lengths."""
    lengths = draw_lengths(np.random.default_rng(0), 3000, samples, 21_000)
    home = np.arange(len(lengths)) * ranks // len(lengths)
    problem = Problem(CostModel.balanced_at(3072)(lengths), lengths, home, ranks)
    names = ("none", "fixed", "local", "greedy")
    largest = max(assign(problem, PARTITIONERS[name]).loads.max() for name in names)
    height = 2 * (ranks * ROW + GAP + 24) + 20
    parts = svg.begin(2 * (WIDTH + LEFT) + 60, height)
    for place, name in enumerate(names):
        x = LEFT + (place % 2) * (WIDTH + LEFT + 20)
        y = 34 + (place // 2) * (ranks * ROW + GAP + 24)
        parts += draw_panel(problem, name, x, y, largest)
        if place % 2 == 0:
            parts.append(svg.text(8, y + ranks * ROW / 2, "ranks"))
    parts.append(
        svg.text(
            LEFT,
            height - 8,
            "Predicted. A box is a sample, as wide as its cost; the red line "
            "is the mean of the ranks.",
        )
    )
    return svg.finish(parts)


# ---- straggler % with and without balancing

ARMS = {"none": svg.RED, "greedy": svg.BLUE, "local": svg.TEAL, "adapted": svg.GREEN}
PREDICTED = {
    "none": svg.RED,
    "fixed": svg.ORANGE,
    "greedy": svg.BLUE,
    "local": svg.TEAL,
    "karmarkar_karp": svg.VIOLET,
}


def draw_straggler(used: Results) -> str:
    """Draws straggler %: measured on real ranks, and predicted over ranks and history length."""
    left, top, wide = 76.0, 56.0, 150.0
    parts = [
        svg.text(left - 60, 22, "straggler % as the ledger measured it", more='font-weight="bold"')
    ]
    measured = {
        name: result for name, result in used.items() if name.startswith("balance-measured")
    }
    most = max(row["straggler_percent"] for result in measured.values() for row in result["rows"])
    x = left
    for result in measured.values():
        rows = {row["arm"]: row for row in result["rows"]}
        made = [
            svg.Bar(
                arm,
                rows[arm]["straggler_percent"],
                f"{rows[arm]['straggler_percent']:.1f} %",
                ARMS[arm],
            )
            for arm in ARMS
        ]
        device = "GPU ranks on one H200" if result["machine"]["gpu"] else "CPU ranks"
        parts += svg.bars(
            f"{rows['none']['ranks']} {device}", made, x, top, wide, names=x == left, most=most
        )
        x += wide + 130
    below = top + 22 * len(ARMS) + 60
    grid = [
        row
        for row in used["balance-cpu"]["rows"]
        if (row["median"], row["cap"], row["batch"]) == (3000, 21_000, 128)
    ]
    lines = [
        svg.Line(
            arm,
            [(row["ranks"], row["straggler_percent"]) for row in grid if row["arm"] == arm],
            ink,
            predicted=True,
        )
        for arm, ink in PREDICTED.items()
    ]
    ticks = [(row["ranks"], str(row["ranks"])) for row in grid if row["arm"] == "none"]
    by_ranks = svg.Axes(
        "straggler %, predicted by the cost model", "ranks of 128 samples", ticks, lines, wide=320
    )
    simulated = make_axes_over_lengths(used["simulate-paper"]["rows"])
    again = [
        svg.Line(line.name, line.points, PREDICTED[line.name], True) for line in simulated.lines
    ]
    by_length = svg.Axes(
        "straggler %, predicted by the simulator, 64 GPUs",
        simulated.below,
        simulated.ticks,
        again,
        wide=320,
    )
    parts += by_ranks.draw(50, below) + by_length.draw(480, below)
    inks, taken = svg.legend(lines, 50, below + 240, 700)
    bottom = below + 240 + taken + 4
    note = (
        "Full bars: measured (adapted: greedy with --balance-adapt). Dashed lines, hollow "
        "dots: predicted."
    )
    words, tall = svg.caption(50, bottom, 800, used, note)
    return svg.finish([*svg.begin(860, bottom + tall), *parts, *inks, *words])
