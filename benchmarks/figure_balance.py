"""Draws the predicted cost of each rank before and after balancing, and what it moved, as a picture.

    .venv/bin/python benchmarks/figure_balance.py docs/figures/balance.svg --data histories.parquet --ranks 8 --global-batch 256

Without --data: log-normal lengths (median 3,000, sigma 1, cap 21,000).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from freescale.balance.cost import CostModel
from freescale.balance.partition import Problem, assign
from freescale.balance.registry import PARTITIONERS

WIDTH, LEFT, ROW, GAP = 250, 60, 16, 30
TEXT = 'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333"'
SHADES = ("#4c78a8", "#7a9cc6")  # neighbouring samples


def lengths_of(path: Path | None, samples: int) -> np.ndarray:
    if path is None:
        random = np.random.default_rng(0)
        return np.clip(np.rint(np.exp(random.normal(np.log(3000), 1.0, samples))), 1, 21_000).astype(np.int64)
    from freescale.data.loader import Histories

    data = Histories(path, samples, max_length=21_000, split="none", negatives=1, in_batch_share=0.0)
    return data.batch(0).sequences["history"].lengths.numpy()


def panel(problem: Problem, name: str, x: float, y: float, largest: float) -> list[str]:
    """One box per rank: its samples side by side, the most expensive first; a line at the mean."""
    found = assign(problem, PARTITIONERS[name])
    share = 100 * found.moved_tokens / max(1, problem.tokens.sum())
    title = f"{name}: {found.straggler_percent:.1f} % straggler, {share:.0f} % of tokens moved"
    parts = [f'<text x="{x}" y="{y - 8}" {TEXT}>{title}</text>']
    scale = WIDTH / largest
    for rank in range(problem.ranks):
        mine = np.sort(problem.costs[found.rank_of == rank])[::-1]
        left = x
        for place, cost in enumerate(mine):
            width = cost * scale
            top = y + rank * ROW
            parts.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.2f}" height="{ROW - 3}" fill="{SHADES[place % 2]}"/>')
            left += width
    mean = x + found.loads.mean() * scale
    bottom = y + problem.ranks * ROW
    parts.append(f'<line x1="{mean:.1f}" x2="{mean:.1f}" y1="{y - 4}" y2="{bottom}" stroke="#e45756" stroke-width="1.5"/>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=128)
    options = parser.parse_args()
    lengths = lengths_of(options.data, options.global_batch)
    home = np.arange(len(lengths)) * options.ranks // len(lengths)
    problem = Problem(CostModel.balanced_at(3072)(lengths), lengths, home, options.ranks)
    names = ("none", "fixed", "local", "greedy")
    largest = max(assign(problem, PARTITIONERS[name]).loads.max() for name in names)
    height = 2 * (options.ranks * ROW + GAP + 24) + 20
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (WIDTH + LEFT) + 60} {height}" role="img">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for place, name in enumerate(names):
        x = LEFT + (place % 2) * (WIDTH + LEFT + 20)
        y = 34 + (place // 2) * (options.ranks * ROW + GAP + 24)
        parts += panel(problem, name, x, y, largest)
        if place % 2 == 0:
            middle = y + options.ranks * ROW / 2
            parts.append(f'<text x="8" y="{middle:.0f}" {TEXT}>ranks</text>')
    note = "A box is a sample, as wide as its predicted cost; the red line is the mean of the ranks."
    parts.append(f'<text x="{LEFT}" y="{height - 8}" {TEXT}>{note}</text></svg>')
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
