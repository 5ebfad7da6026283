"""Settings of the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from freescale.config.options import Checked, option
from freescale.config.train import TrainConfig


@dataclass(frozen=True)
class SimulateConfig(Checked):
    """Settings of `freescale simulate`. The defaults are the paper's setting; what the paper does
    not say is marked (assumed)."""

    run: str | None = option(
        None,
        "folder of a run of `freescale train`: its model, data, samples of a rank, placement "
        "and schedule are taken, unless they are given",
    )
    recipe: str | None = option(
        None,
        "a recipe of `freescale train` that names the sizes of its tables, as dlrm-v4: predicts "
        "samples/s, memory and time on 8, 16, 32 and 64 H100s and H200s",
    )
    preset: str = option(
        "paper",
        "machine: a network and a compute curve that are shipped (`--preset list` names them)",
    )
    network: str | None = option(None, "TOML file of your own instead of the preset's network")
    calibration: str | None = option(
        None,
        "compute curve: a shipped one or a file of `simulate calibrate` (default: the preset's)",
    )
    data: str | None = option(
        None,
        "histories or interactions, read as `freescale train` does (default: generated histories)",
    )
    cache: str | None = option(
        None, "folder for prepared histories (default: a folder of the user's cache)"
    )
    batch: int = option(128, "samples of a GPU", minimum=1)
    median: float = option(3000.0, "median length of generated histories (assumed)", above=0.0)
    sigma: float = option(
        1.0, "spread of the logarithm of generated lengths (assumed)", minimum=0.0
    )
    cap: int = option(21_000, "longest history", minimum=2)
    items: int = option(100_000_000, "size of the generated catalogue (assumed)", minimum=2)
    popularity: float = option(1.0, "Zipf exponent of generated items (assumed)", minimum=0.0)
    collisions: float | None = option(
        0.1,
        "share of a generated batch's requests that the previous batch makes too (assumed)",
        minimum=0.0,
        maximum=1.0,
    )
    natural: bool = option(
        False, "let the popularity determine collisions, instead of --collisions"
    )
    pooled_features: int = option(
        0,
        "pooled features of a generated sample in addition to its history, each with its own table",
        minimum=0,
    )
    pooled_ids: int = option(
        1, "ids that a sample has of each pooled feature (the pooling factor)", minimum=1
    )
    pooled_rows: int = option(1_000_000, "rows of each pooled feature's table", minimum=2)
    width: int = option(512, "width of embeddings and layers (assumed)", minimum=1)
    layers: int = option(8, "HSTU layers (assumed)", minimum=1)
    heads: int = option(4, "attention heads (assumed)", minimum=1)
    attend: str | None = option(
        None, "what an event sees of its history, as of `freescale train` (first=64,last=1024)"
    )
    schedule: str | None = option(
        None,
        "one schedule only (default: all techniques, alone and together)",
        choices=("serial", "sparse_dist", "stale", "staged"),
    )
    balance: str = option("greedy", "partitioner, as of `freescale train`")
    transport: str = option(
        "hostwire", "what carries ids, rows and gradients", choices=("collective", "hostwire")
    )
    placement: str = option(
        "auto",
        "placement of tables; auto: by the rule of training; host: the item table is sharded, in "
        "host memory behind a cache",
        choices=("auto", "sharded", "replicated", "host"),
    )
    cache_miss: float = option(
        100.0,
        "with --placement host: percent of a step's rows that are not in the cache "
        "(cache_miss_percent of a ledger)",
        minimum=0.0,
        maximum=100.0,
    )
    rows: str = option(
        "",
        "a dynamic item table, as of `freescale train`: item=dynamic:50M:seen=2 has room for so "
        "many rows, and the notes say how it grows",
    )
    row_optimizer: str = option(
        TrainConfig.row_optimizer,
        "optimizer of table rows, whose state counts when tables are placed",
        choices=("sgd", "adagrad", "rowwise_adagrad", "adam", "counted_adam"),
    )
    split_histories: str = option(
        TrainConfig.split_histories, "as of `freescale train`, where batches are balanced"
    )
    adapt: bool = option(False, "the balancer's cost model learns from the simulated times")
    jitter: float | None = option(
        None,
        "standard deviation of a rank's compute from the curve, as a share (default: the "
        "calibration's)",
        minimum=0.0,
        maximum=1.0,
    )
    steps: int = option(20, "steps to simulate; the first two are not averaged", minimum=3)
    seed: int = option(0, "seed of generated lengths")
    out: str | None = option(
        None, "folder for ledger.json, ledger.jsonl and trace.json.gz of each configuration"
    )
