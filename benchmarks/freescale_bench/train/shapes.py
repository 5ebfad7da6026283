"""The shapes of `freescale bench train`, and the files that they train on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.data.synthetic.draws import LengthDistribution


@dataclass(frozen=True)
class Shape:
    """A model and its histories. Everything else is a default of `freescale train`, except biases,
    which NVIDIA's shapes and the public HSTU's kernels lack."""

    name: str
    samples: int  # per batch
    width: int
    layers: int
    heads: int
    cap: int  # events of the longest history
    median: float = 0.0  # of log-normal lengths
    lengths: Literal["lognormal", "fixed", "shuffled zipf"] = "lognormal"
    sigma: float = 1.0
    items: int = 100_000
    users: int = 0  # of the file; 0: enough for `batches` batches
    batches: int = 40
    negatives: int = 128
    dropout: float = 0.1
    temperature: float = 0.1
    biases: bool = False  # position and time biases, the default of `freescale train`
    encoder: str = "hstu"
    # Steps before the first timed one: by then every batch size has a CUDA graph.
    warmup: int = 300
    windows: int = 20  # timed, of ten steps each

    def draw_lengths(self, seed: int = 0) -> NDArray[np.int64]:
        """Draws the number of events of each user. It is one more than the history, because the
        last event is only a target."""
        random = np.random.default_rng(seed)
        users = self.users or self.samples * self.batches
        if self.lengths == "fixed":
            drawn = np.full(users, self.cap, np.int64)
        elif self.lengths == "shuffled zipf":
            # Like NVIDIA's generator: Zipf's weights over the lengths in random order.
            weights = 1.0 / np.arange(1, self.cap + 1) ** 1.2
            drawn = random.choice(
                random.permutation(np.arange(1, self.cap + 1)), users, p=weights / weights.sum()
            )
        else:
            ends = LengthDistribution.from_options(
                "lognormal", self.median, self.sigma, 0.0, self.cap
            ).ends
            # Every quantile once: the mean of a few long-tailed random lengths would vary too much.
            quantiles = (random.permutation(users) + 0.5) / users
            drawn = np.searchsorted(ends, quantiles, "right")
        return drawn.astype(np.int64) + 1

    def describe(self) -> dict[str, Any]:
        """Returns the columns of a result that describe the shape."""
        return {
            "shape": self.name,
            "samples": self.samples,
            "width": self.width,
            "layers": self.layers,
            "heads": self.heads,
            "longest": self.cap,
            "negatives": self.negatives,
            "biases": self.biases,
            "encoder": self.encoder,
        }


_HEADLINES = (
    Shape("short", 256, 64, 2, 2, cap=200, median=100, biases=True),
    Shape("medium", 64, 256, 4, 4, cap=2048, median=500, biases=True),
    Shape(
        "long", 16, 512, 8, 4,
        cap=16_384, median=3000, batches=24, windows=3, warmup=20, biases=True,
    ),
    Shape(
        "wide", 32, 1024, 8, 8, cap=4096, median=9500, batches=12, windows=2, warmup=10, biases=True
    ),
)  # fmt: skip
SHAPES = {
    shape.name: shape
    for shape in (
        *_HEADLINES,
        *(
            replace(shape, name=f"{shape.name}, SASRec", encoder="sasrec", biases=False)
            for shape in _HEADLINES[:2]
        ),
        *(replace(shape, name=f"{shape.name}, no biases", biases=False) for shape in _HEADLINES),
        Shape(
            "nvidia fixed", 32, 1024, 8, 4,
            cap=4099, lengths="fixed", batches=8, windows=2, warmup=10,
        ),
        Shape(
            "nvidia jagged", 32, 1024, 8, 4,
            cap=4096, lengths="shuffled zipf", batches=24, windows=3, warmup=10,
        ),
        Shape(
            "movielens", 128, 64, 2, 1,
            cap=200, median=96, items=3416, users=6040, dropout=0.2, temperature=0.05,
        ),
    )
}  # fmt: skip


def write_interactions(
    shape: Shape, path: Path, seed: int = 0, popularity: float | None = 1.0
) -> Path:
    """Writes user_id, item_id (from 1; `popularity` is the exponent of Zipf's law; None: every item
    occurs before any repeats) and timestamp."""
    lengths = shape.draw_lengths(seed)
    random = np.random.default_rng(seed + 1)
    users = np.repeat(np.arange(len(lengths)), lengths)
    if popularity is None:
        items = 1 + np.resize(random.permutation(shape.items), len(users))
    else:
        weights = 1.0 / np.arange(1, shape.items + 1) ** popularity
        ends = np.cumsum(weights / weights.sum())
        items = 1 + np.minimum(np.searchsorted(ends, random.random(len(users))), shape.items - 1)
    starts = np.cumsum(lengths) - lengths
    times = np.arange(len(users)) - starts[users]
    columns = {"user_id": users, "item_id": items, "timestamp": 60 * times}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path
