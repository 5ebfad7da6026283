"""`freescale bench attention` with the smallest sizes. As a program: its rows, figures and claims,
as JSON."""

from __future__ import annotations

import json

import torch
from freescale_bench.attention import bench
from freescale_bench.common.results import make_claims

from freescale.visible import Visible

SIZE = {
    "samples": 1, "length": 40, "heads": 1, "widths": (32,), "visible": Visible(3, 8),
    "checked": 90, "checked_visible": Visible(3, 20),
    "biased": {"long": (1, 30, 1), "wide": (1, 20, 1)},
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    bench.SIZES["cpu"] = SIZE
    found, figures = bench.measure_attention("cpu", list(bench.MEASURES))
    claims = make_claims(bench.list_targets(SIZE), figures)
    print(json.dumps({"rows": found.rows, "figures": figures, "claims": claims}))
