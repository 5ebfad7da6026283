"""Settings of generated histories."""

from __future__ import annotations

from dataclasses import dataclass

from freescale.config.options import Checked, option, split_names


@dataclass(frozen=True)
class GenerateConfig(Checked):
    """Settings of `freescale generate`."""

    users: int = option(10_000, "histories", minimum=1)
    items: int = option(100_000, "size of the catalogue", minimum=1)
    lengths: str = option(
        "lognormal", "distribution of the histories' lengths", choices=("lognormal", "zipf")
    )
    median: float = option(200.0, "median length (lognormal)", above=0.0)
    sigma: float = option(1.0, "spread of the logarithm (lognormal)", minimum=0.0)
    zipf_exponent: float = option(1.5, "Zipf exponent of lengths (zipf)")
    cap: int = option(21_000, "longest history", minimum=2, maximum=21_000)
    popularity: float = option(1.0, "Zipf exponent of item popularity", minimum=0.0)
    collision: float | None = option(
        None,
        "share of a batch's requests whose row the batch before reads too, 0 to 1",
        minimum=0.0,
        maximum=1.0,
    )
    global_batch: int = option(64, "global batch that --collision refers to", minimum=1)
    ranks: int = option(1, "number of ranks that --collision refers to", minimum=1)
    labels: str = option("", "label columns to make, comma-separated (for ranking)")
    seed: int = option(0, "seed of everything random")

    @property
    def label_names(self) -> tuple[str, ...]:
        return split_names(self.labels)
