"""Settings of a run, with their defaults, help and limits. Imports nothing heavy: `--help` is made
from here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

_OPTIMIZATION = "Optimization"
_DISTRIBUTION = "Schedule, balancing and communication"
_OUTPUT = "Evaluation, checkpoints and logs"


def option(default: Any, help: str, heading: str | None = None, **checks: Any) -> Any:
    """A field with its help text and checks (`minimum`, `maximum`, `choices`, `above`, `below`).
    `heading`: where it stands in the help, if not under that of its class."""
    shown = {"help": help} | ({"heading": heading} if heading else {})
    return field(default=default, metadata={**shown, **checks})


def _names(text: str) -> tuple[str, ...]:
    """Of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


class _Checked:
    heading: ClassVar[str] = "Options"  # under which the help lists the settings

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            value, rules = getattr(self, entry.name), entry.metadata
            flag = "--" + entry.name.replace("_", "-")
            if value is None:
                continue
            if "choices" in rules and value not in rules["choices"]:
                raise ValueError(
                    f"{flag} must be one of {', '.join(rules['choices'])}, not {value!r}"
                )
            if "minimum" in rules and not value >= rules["minimum"]:
                raise ValueError(f"{flag} must be at least {rules['minimum']}, got {value}")
            if "maximum" in rules and not value <= rules["maximum"]:
                raise ValueError(f"{flag} must be at most {rules['maximum']}, got {value}")
            if "above" in rules and not value > rules["above"]:
                raise ValueError(f"{flag} must be above {rules['above']}, got {value}")
            if "below" in rules and not value < rules["below"]:
                raise ValueError(f"{flag} must be below {rules['below']}, got {value}")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)  # type: ignore[call-overload]


@dataclass(frozen=True)
class DataConfig(_Checked):
    """What is read, how it is split and what a sample holds. Every field is an option of
    `freescale train`."""

    heading: ClassVar[str] = "Data"

    data: str = option("", "histories or interactions: Parquet, MovieLens, Amazon or KuaiRand file")
    format: str = option(
        "auto", "file format", choices=("auto", "parquet", "movielens", "amazon", "kuairand")
    )
    cache: str | None = option(
        None, "folder for prepared histories (default: a folder of the user's cache)"
    )
    num_items: int | None = option(
        None,
        "size of the catalogue (default: the largest item id in the data, plus one)",
        minimum=1,
    )
    max_length: int = option(
        200, "history events that a sample holds at most", minimum=1, maximum=21000
    )
    split: str = option(
        "leave-one-out", "what is held out", choices=("leave-one-out", "time", "none")
    )
    split_time: int | None = option(None, "first timestamp of the test part, with --split time")
    negatives: int | None = option(
        None,
        "negatives of each --negatives-per (retrieval; default: 256 of a sample or position, 1,024 "
        "of a batch)",
        minimum=1,
    )
    negatives_per: str = option(
        "sample",
        "what has negatives of its own: each sample, each position, or the batch as a whole (auto: "
        "the batch where histories are short, else each sample)",
        choices=("auto", "sample", "position", "batch"),
    )
    in_batch_share: float = option(
        0.0, "share of negatives that come from the batch", minimum=0.0, maximum=1.0
    )
    candidates: int = option(8, "candidates of each sample (ranking)", minimum=1)
    shuffle: bool = option(True, "shuffle users, by the seed and the epoch")
    workers: int | None = option(
        None,
        "processes of a rank that make batches ahead (default: 0, a thread, on CPUs; up to 8 on "
        "GPUs, by the cores)",
        minimum=0,
    )


@dataclass(frozen=True)
class ModelConfig(_Checked):
    """The shape of the model. Every field is an option of `freescale train`."""

    heading: ClassVar[str] = "Model"

    task: str = option("retrieval", "what to train", choices=("retrieval", "ranking"))
    labels: str = option("", "label columns of the ranking tasks, comma-separated")
    width: int = option(64, "width of embeddings and layers", minimum=1)
    layers: int = option(2, "HSTU layers", minimum=1)
    heads: int = option(2, "attention heads", minimum=1)
    dropout: float = option(0.1, "dropout, keyed by the sample", minimum=0.0, maximum=0.99)
    position_bias: bool = option(True, "relative position bias in attention")
    time_bias: bool = option(True, "relative time bias in attention")
    temperature: float = option(0.1, "softmax temperature (retrieval)", above=0.0)
    segment: int | None = option(
        None,
        "cut histories into segments of so many events, seen later by their summaries alone",
        minimum=1,
    )
    segment_tokens: int = option(4, "learned summaries of a segment, with --segment", minimum=1)
    segment_weight: float = option(
        1.0,
        "events that a summary counts for where later segments see it, with --segment",
        above=0.0,
    )
    segment_pooling: bool = option(
        False, "summaries start with the pooled events of their segment, with --segment"
    )
    recompute: bool = option(
        False, "activation checkpointing: recompute layers in backward to save memory"
    )


@dataclass(frozen=True)
class TrainConfig(_Checked):
    """How a run trains. Every field is an option of `freescale train`."""

    heading: ClassVar[str] = _OPTIMIZATION

    global_batch: int = option(64, "samples of a step, over all ranks", minimum=1)
    epochs: int = option(10, "passes over the users", minimum=1)
    steps: int | None = option(None, "stop after this many steps", minimum=1)
    lr: float = option(3e-3, "learning rate of the dense parameters (AdamW)", minimum=0.0)
    weight_decay: float = option(0.0, "weight decay of the dense parameters", minimum=0.0)
    row_optimizer: str = option(
        "adam", "optimizer of table rows", choices=("sgd", "adagrad", "rowwise_adagrad", "adam")
    )
    row_lr: float = option(3e-3, "learning rate of table rows", minimum=0.0)
    warmup: int = option(0, "steps of linear learning-rate warm-up", minimum=0)
    decay: str = option(
        "constant", "learning rate after warm-up", choices=("constant", "linear", "cosine")
    )
    clip: float | None = option(None, "global norm limit of the dense gradients", above=0.0)
    row_clip: float | None = option(None, "norm limit of each table row's gradient", above=0.0)
    accumulate: int = option(1, "micro-batches of a rank's batch", minimum=1)
    precision: str = option(
        "auto",
        (
            "compute precision: fp32 is float32 throughout, tf32 rounds the factors of its matrix "
            "products (GPUs), bf16 is autocast; auto is bf16 on GPUs that have it, else fp32"
        ),
        choices=("auto", "fp32", "tf32", "bf16"),
    )
    schedule: str = option(
        "staged",
        "how communication and compute are ordered",
        choices=("staged", "serial"),
        heading=_DISTRIBUTION,
    )
    balance: str = option(
        "greedy",
        (
            "which rank computes which sample: none, fixed, variable, greedy, greedy_equal, local, "
            "karmarkar_karp or module:function"
        ),
        heading=_DISTRIBUTION,
    )
    balance_cap: int | None = option(
        None,
        "tokens that a rank may hold at most (default: mean plus largest sample)",
        minimum=1,
        heading=_DISTRIBUTION,
    )
    balance_adapt: bool = option(
        False,
        "correct the cost model by measured times (assignments then depend on them, too)",
        heading=_DISTRIBUTION,
    )
    transport: str = option(
        "auto",
        (
            "what carries ids, rows, gradients and samples: process groups, or copy engines and "
            "the CPU"
        ),
        choices=("auto", "collective", "hostwire-gloo", "hostwire-tcp", "hostwire-ucx"),
        heading=_DISTRIBUTION,
    )
    dense_sums: str = option(
        "auto",
        (
            "what sums gradients of dense parameters: the process group (NCCL on GPUs), or the "
            "ranks, a partition each, over --transport; auto times both before step 1"
        ),
        choices=("auto", "collective", "partitioned"),
        heading=_DISTRIBUTION,
    )
    wire_precision: str = option(
        "full",
        "precision of rows and gradients on the way (bf16 rounds each value)",
        choices=("full", "bf16"),
        heading=_DISTRIBUTION,
    )
    compress_dense: float | None = option(
        None,
        (
            "share of the dense gradients' entries that a step holds back: 0.99 sends the largest "
            "1 % (default: all, the exact step)"
        ),
        minimum=0.0,
        below=1.0,
        heading=_DISTRIBUTION,
    )
    compress_every: int = option(
        10,
        "steps between two resets of the thresholds of --compress-dense",
        minimum=1,
        heading=_DISTRIBUTION,
    )
    placement: str = option(
        "auto",
        "auto, sharded or replicated; or table=choice, comma-separated",
        heading=_DISTRIBUTION,
    )
    device: str = option(
        "auto", "where to compute", choices=("auto", "cpu", "cuda"), heading=_DISTRIBUTION
    )
    seed: int = option(0, "seed of everything random")
    timeout: float = option(
        120.0,
        "seconds after which a silent collective is an error",
        above=0.0,
        heading=_DISTRIBUTION,
    )
    evaluate_every: int | None = option(
        None,
        "epochs between evaluations on the validation part (default: only at the end)",
        minimum=1,
        heading=_OUTPUT,
    )
    eval_batch: int = option(
        256, "samples of an evaluation batch, over all ranks", minimum=1, heading=_OUTPUT
    )
    checkpoint_every: int = option(
        1000, "steps between checkpoints (the end is always one)", minimum=1, heading=_OUTPUT
    )
    keep_checkpoints: int = option(2, "checkpoints to keep", minimum=1, heading=_OUTPUT)
    log_every: int = option(10, "steps between log lines", minimum=1, heading=_OUTPUT)
    trace_steps: int = option(100, "steps in the trace", minimum=0, heading=_OUTPUT)
    profile_steps: int = option(
        5,
        "steps that torch's profiler sees on GPUs, for the report: device busy, launches; 0: none",
        minimum=0,
        heading=_OUTPUT,
    )
    tensorboard: bool = option(False, "write TensorBoard events too", heading=_OUTPUT)


@dataclass(frozen=True)
class GenerateConfig(_Checked):
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
    global_batch: int = option(64, "batch that --collision speaks of", minimum=1)
    ranks: int = option(1, "ranks that --collision speaks of", minimum=1)
    labels: str = option("", "label columns to make, comma-separated (for ranking)")
    seed: int = option(0, "seed of everything random")

    @property
    def label_names(self) -> tuple[str, ...]:
        return _names(self.labels)


@dataclass(frozen=True)
class SimulateConfig(_Checked):
    """Settings of `freescale simulate`. The defaults are the paper's setting; what the paper does
    not say is marked (assumed)."""

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
        None, "histories or interactions whose lengths and ids are used (default: generated ones)"
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
        "share of a generated batch's requests that the batch before makes too (assumed)",
        minimum=0.0,
        maximum=1.0,
    )
    natural: bool = option(
        False, "leave collisions to what the popularity gives, instead of --collisions"
    )
    width: int = option(512, "width of embeddings and layers (assumed)", minimum=1)
    layers: int = option(8, "HSTU layers (assumed)", minimum=1)
    heads: int = option(4, "attention heads (assumed)", minimum=1)
    schedule: str | None = option(
        None,
        "one schedule only (default: all techniques, alone and together)",
        choices=("serial", "metadata", "stale", "staged"),
    )
    balance: str = option("greedy", "partitioner, as of `freescale train`")
    transport: str = option(
        "hostwire", "what carries ids, rows and gradients", choices=("collective", "hostwire")
    )
    placement: str = option(
        "auto",
        "where the item table lies; auto: by the rule of training",
        choices=("auto", "sharded", "replicated"),
    )
    adapt: bool = option(False, "the balancer's cost model learns from the simulated times")
    jitter: float | None = option(
        None,
        (
            "standard deviation of a rank's compute from the curve, as a share (default: the "
            "calibration's)"
        ),
        minimum=0.0,
        maximum=1.0,
    )
    steps: int = option(20, "steps to simulate; the first two are not averaged", minimum=3)
    seed: int = option(0, "seed of generated lengths")
    out: str | None = option(
        None, "folder for ledger.json, ledger.jsonl and trace.json.gz of each configuration"
    )


@dataclass(frozen=True)
class RunConfig:
    """Everything that makes a run; `config.json` of its folder."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.data.data:
            raise ValueError("--data is missing: name a file of histories or interactions")
        if self.data.split == "time" and self.data.split_time is None:
            raise ValueError(
                "--split time needs --split-time, the first timestamp of the test part"
            )
        if self.model.task == "ranking" and not self.label_names:
            raise ValueError(
                "--task ranking needs --labels, the label columns (e.g. is_click,is_like)"
            )
        if self.model.width % self.model.heads:
            raise ValueError(
                f"--width {self.model.width} is not a multiple of --heads {self.model.heads}"
            )
        segment, tokens, longest = (
            self.model.segment,
            self.model.segment_tokens,
            self.data.max_length,
        )
        if segment is not None and segment > longest:
            raise ValueError(
                f"--segment {segment} is longer than the longest history, --max-length {longest}"
            )
        if segment is not None and tokens > segment:
            raise ValueError(
                f"--segment-tokens {tokens} are more than the events of a segment, "
                f"--segment {segment}"
            )
        if segment is not None and self.model.segment_weight > segment / tokens:
            raise ValueError(
                f"--segment-weight {self.model.segment_weight:g} is more than the "
                f"{segment / tokens:g} events that a token stands "
                f"for, --segment {segment} by --segment-tokens {tokens}"
            )

    @property
    def label_names(self) -> tuple[str, ...]:
        return _names(self.model.labels)

    @property
    def placements(self) -> str | dict[str, str]:
        """--placement as parallelize takes it: `auto`, or `item=sharded,action=replicated` as a
        mapping."""
        if "=" not in self.train.placement:
            return self.train.placement
        return dict(part.split("=", 1) for part in self.train.placement.replace(" ", "").split(","))

    @staticmethod
    def from_settings(given: Mapping[str, Any], base: RunConfig | None = None) -> RunConfig:
        """A configuration from settings by their names, wherever they belong.

        Args:
            given: values by name, as of `freescale train`: {"data": "histories.parquet",
                "steps": 100}. None stands for a setting that was not given.
            base: supplies the settings that were not given; without it their defaults do.

        Raises:
            ValueError: if a name is no setting, or a value is out of its limits.
        """
        known = {entry.name for kind in _PARTS.values() for entry in fields(kind)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"unknown settings: {', '.join(unknown)}")
        parts: dict[str, Any] = {}
        for part, kind in _PARTS.items():
            names = [entry.name for entry in fields(kind)]
            values = {name: getattr(getattr(base, part), name) for name in names} if base else {}
            values |= {name: given[name] for name in names if given.get(name) is not None}
            parts[part] = kind(**values)
        return RunConfig(**parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> RunConfig:
        """The configuration of a `config.json`. ValueError names settings that do not exist."""
        raw: Mapping[str, Mapping[str, Any]] = json.loads(text)
        for part, kind in _PARTS.items():
            unknown = set(raw.get(part, {})) - {entry.name for entry in fields(kind)}
            if unknown:
                raise ValueError(
                    f"config.json has unknown settings in {part!r}: {', '.join(sorted(unknown))}"
                )
        return RunConfig(**{part: kind(**raw.get(part, {})) for part, kind in _PARTS.items()})


_PARTS: dict[str, Any] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}
