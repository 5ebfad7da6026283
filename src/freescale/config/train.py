"""Settings of training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from freescale.config.options import Checked, option

_distribution_option = partial(option, heading="Distribution")
_output_option = partial(option, heading="Output")


def parse_split(split: str | int) -> str | int:
    """`auto`, `off` or the number of parts of a divided history. ValueError for anything else."""
    if split in ("auto", "off"):
        return split
    if not str(split).isdecimal() or int(split) < 2:
        raise ValueError(
            f"split_histories is {split!r}: give auto, off or the number of parts, at least 2"
        )
    return int(split)


@dataclass(frozen=True)
class TrainConfig(Checked):
    """How a run trains. Every field is an option of `freescale train`."""

    heading: ClassVar[str] = "Training"

    global_batch: int = option(64, "samples of a step, over all ranks", minimum=1, common=True)
    epochs: int = option(
        10, "passes over the users (one with --order time)", minimum=1, common=True
    )
    steps: int | None = option(None, "stop after this many steps", minimum=1)
    lr: float = option(
        3e-3, "learning rate of the dense parameters (AdamW)", minimum=0.0, common=True
    )
    weight_decay: float = option(0.0, "weight decay of the dense parameters", minimum=0.0)
    beta1: float = option(
        0.9, "decay of the first moments of AdamW and the rows' Adam", minimum=0.0, below=1.0
    )
    beta2: float = option(
        0.98,
        "decay of the second moments of AdamW and the rows' Adam",
        minimum=0.0,
        below=1.0,
        formerly=0.999,
    )
    row_optimizer: str = option(
        "adam",
        "optimizer of table rows; counted_adam corrects moments by the updates of each row, adam "
        "by the steps of the run",
        choices=("sgd", "adagrad", "rowwise_adagrad", "adam", "counted_adam"),
    )
    row_lr: float = option(3e-3, "learning rate of table rows", minimum=0.0, common=True)
    row_eps: float | None = option(
        None,
        "added to the root by the optimizer of table rows (default: 1e-10, of Adam 1e-8)",
        above=0.0,
    )
    warmup: int = option(0, "steps of linear learning-rate warm-up", minimum=0)
    decay: str = option(
        "constant",
        "learning rate after warm-up; trapezoid: constant, then linear to 0 over the last 30 %",
        choices=("constant", "linear", "cosine", "trapezoid"),
    )
    clip: float | None = option(None, "global norm limit of the dense gradients", above=0.0)
    row_clip: float | None = option(None, "norm limit of each table row's gradient", above=0.0)
    task_weights: str | None = option(
        None, "weights of the losses of labels (ranking), as buy=0.5,like=2 (default: 1 each)"
    )
    accumulate: int = option(1, "micro-batches of a rank's batch", minimum=1)
    on_nonfinite: str = option(
        "stop",
        "when the loss is not finite: stop the run, or (once) go back to the last checkpoint "
        "and leave out the batch",
        choices=("stop", "rollback"),
    )
    precision: str = option(
        "auto",
        "compute precision: fp32 is float32 throughout, tf32 rounds the factors of its matrix "
        "products (GPUs), bf16 is autocast; auto is bf16 on GPUs that have it, else fp32",
        choices=("auto", "fp32", "tf32", "bf16"),
    )
    schedule: str = _distribution_option(
        "staged", "how communication and compute are ordered", choices=("staged", "serial")
    )
    balance: str = _distribution_option(
        "greedy",
        "which rank computes which sample: none, fixed, variable, greedy, greedy_equal, local, "
        "karmarkar_karp or module:function",
    )
    balance_cap: int | None = _distribution_option(
        None, "tokens that a rank may hold at most (default: mean plus largest sample)", minimum=1
    )
    balance_adapt: bool = _distribution_option(
        False, "correct the cost model by measured times (assignments then depend on them, too)"
    )
    split_histories: str = _distribution_option(
        "off",
        "histories that cost more than a rank's share are computed by several ranks (HSTU): off, "
        "auto, or the number of parts",
    )
    transport: str = _distribution_option(
        "auto",
        "what carries ids, rows, gradients and samples: process groups, or copy engines and "
        "the CPU",
        choices=("auto", "collective", "hostwire-tcp", "hostwire-ucx"),
        former_choices=("hostwire-gloo",),  # connect() replaces it and prints by what
    )
    dense_sums: str = _distribution_option(
        "auto",
        "what sums gradients of dense parameters: the process group (NCCL on GPUs), or the "
        "ranks, a partition each, over --transport; auto times both before step 1",
        choices=("auto", "collective", "partitioned"),
    )
    wire_precision: str = _distribution_option(
        "full",
        "precision of rows and gradients on the way (bf16 rounds each value)",
        choices=("full", "bf16"),
    )
    exchange: str = _distribution_option(
        "auto",
        "rows and gradients between machines: flat sends them once per rank, two-level once per "
        "machine, which adds gradients in another order; auto is two-level from four ranks per "
        "machine, without RDMA, and a resumed run keeps its own",
        choices=("auto", "flat", "two-level"),
    )
    placement: str = _distribution_option(
        "auto",
        "auto, sharded, replicated, host:8GB (rows in host memory, the size is that of the cache "
        "on the GPU) or disk:FOLDER:8GB; or table=choice, comma-separated",
    )
    rows: str = _distribution_option(
        "",
        "dynamic tables, whose rows come and go with the ids: item=dynamic:50M has room for so "
        "many; item=dynamic:50M:seen=3:lfu also gives an id its row in its third batch and "
        "chooses which row is evicted (lru, lfu, lfu=BATCHES or after=STEPS); default=learned: "
        "ids without a row read a trained one, not zeros; map=device: the GPU decides, not the "
        "host; comma-separated (default: every id has its row)",
    )
    device: str = _distribution_option(
        "auto",
        "where to compute: auto uses a GPU for each rank if there are GPUs, else the CPU",
        choices=("auto", "cpu", "cuda"),
        common=True,
    )
    seed: int = option(0, "seed of everything random")
    timeout: float = _distribution_option(
        120.0, "seconds after which a silent collective is an error", above=0.0
    )
    evaluate_every: int | None = _output_option(
        None,
        "epochs between evaluations on the validation part (default: only at the end; with --order "
        "time, windows between evaluations on the next one: 1)",
        minimum=1,
    )
    eval_batch: int = _output_option(
        256, "samples of an evaluation batch, over all ranks", minimum=1
    )
    checkpoint_every: int = _output_option(
        1000, "steps between checkpoints (the end is always one)", minimum=1
    )
    full_every: int = _output_option(
        1,
        "write a full checkpoint every so many; the others store only the table rows that changed "
        "since the one before",
        minimum=1,
    )
    async_checkpoints: bool = _output_option(
        False, "write checkpoints alongside training, from a copy in host memory"
    )
    deltas: int | str | None = _output_option(
        None,
        "save a checkpoint after each window (epoch), or every so many seconds, and publish what "
        "has changed in the folder `deltas` of the run, for `freescale serve --follow` and "
        "Subscriber; so is every other checkpoint",
        words=("window",),
        minimum=1,
        flag_value="window",
    )
    keep_deltas: int = _output_option(
        20, "deltas to keep; after as many, a full export takes their place", minimum=1
    )
    snapshot_every: int | str | None = _output_option(
        None,
        "steps between snapshots: copies of the state in memory that outlives the ranks, also on "
        "another machine if there is one, for --restarts and --resume auto; auto: the shortest "
        "interval that costs at most 1 % of training (default: none)",
        words=("auto",),
        minimum=1,
    )
    keep_checkpoints: int = _output_option(2, "checkpoints to keep", minimum=1)
    keep: str = _output_option(
        "latest",
        "which checkpoints stay: the latest, or also the best on the validation part, which is "
        "then tested and exported (needs --evaluate-every)",
        choices=("latest", "best"),
    )
    keep_metric: str | None = _output_option(
        None,
        "metric that --keep best and --patience compare (default: ndcg@10/unseen; for ranking "
        "ne of the first label)",
    )
    patience: int | None = _output_option(
        None,
        "stop after this many evaluations without a better one (default: train to the end)",
        minimum=1,
    )
    log_every: int = _output_option(10, "steps between log lines", minimum=1)
    trace_steps: int = _output_option(100, "steps in the trace", minimum=0)
    profile_steps: int = _output_option(
        5,
        "steps that torch's profiler sees on GPUs, for the report: device busy, launches; 0: none",
        minimum=0,
    )
    mlperf_log: str | None = _output_option(
        None, "file for MLPerf's log of a ranking run, which then ends at a validation AUC of 0.75"
    )
    tensorboard: bool = _output_option(False, "write TensorBoard events too")
    tracker: str | None = _output_option(
        None, "send metrics and settings there, too", choices=("mlflow", "wandb")
    )
