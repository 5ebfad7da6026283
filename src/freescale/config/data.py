"""Settings of the data that is read, and of generated histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from freescale.config.columns import parse_columns
from freescale.config.options import Checked, option, split_names
from freescale.config.time_order import (
    DEFAULT_WINDOW,
    Duration,
    parse_actions,
    parse_duration,
    refuse_split,
)

_GENERAL = ("parquet", "csv", "jsonl", "pairs", "sequences", "user-sequences")
_DATA_SETS = ("movielens", "amazon", "kuairand", "yambda")
FORMATS = (*_GENERAL, *_DATA_SETS)
# Settings of --order time, and those of them that are of ranking.
OF_RANKING = ("anchor_actions", "min_history", "history_pools")
OF_TIME = ("window", "windows", *OF_RANKING)
# Settings of --follow.
_STREAM = "lateness late event_id event_id_windows stop_when_idle idle_partition avro_schema"
OF_STREAM = (*_STREAM.split(), "new_values")


@dataclass(frozen=True)
class DataConfig(Checked):
    """The source of the data, its split and the content of a sample. Every field is an option of
    `freescale train`."""

    heading: ClassVar[str] = "Data"

    data: str = option(
        "",
        "histories or interactions: a file (Parquet, CSV, TSV, JSON lines, .inter, lines of ids; "
        ".gz, .zip), a folder, a pattern in quotes, or a URL (s3://...)",
        common=True,
    )
    follow: str | None = option(
        None,
        "instead of --data, events that keep coming: a folder into which files are moved, or "
        "kafka://BROKERS/TOPIC; windows are trained as they are complete",
        common=True,
    )
    format: str = option(
        "auto",
        "file format; auto: by name and content (`freescale inspect` says which)",
        choices=("auto", *FORMATS),
    )
    columns: str = option(
        "",
        "columns by role, if their names are not recognised: user=NAME,item=NAME,time=NAME "
        "(time=order: rows are in order of time), also rating= and action=; numbers from 1 if "
        "there is no header",
        common=True,
    )
    items: str | None = option(
        None,
        "file with attributes of items: a row per item, by the same ids (any format of --data)",
        common=True,
    )
    users: str | None = option(None, "file with attributes of users: a row per user, as --items")
    features: str = option(
        "",
        "columns that are features, as category,price=numeric,tags=multi,brand*color=cross; auto: "
        "all of --items, --users and the events; none (default: all of --items and --users)",
        common=True,
    )
    schema: str | None = option(None, "features with all their settings, a TOML file")
    id_dropout: float = option(
        0.0,
        "share of the items of a training batch that are known by their features alone",
        minimum=0.0,
        below=1.0,
    )
    missing: str = option(
        "refuse", "rows without a user, an item or a time", choices=("refuse", "drop")
    )
    vocabulary: bool = option(
        True,
        "keep the text of item ids that are hashed for a dynamic table (--rows item=dynamic:ROWS), "
        "in vocabulary.parquet; ids that are numbered always have one",
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
        200, "history events that a sample holds at most", minimum=1, maximum=21000, common=True
    )
    split: str = option(
        "leave-one-out", "what is held out", choices=("leave-one-out", "time", "none")
    )
    split_time: int | None = option(None, "first timestamp of the test part, with --split time")
    order: str = option(
        "users",
        "order of the samples: users (each once in an epoch, shuffled) or time (each event once, "
        "window after window, in one pass)",
        choices=("users", "time"),
    )
    window: str | None = option(
        None,
        "length of a window, with --order time: 30min, 12h, 7d, or a number in the unit of the "
        "data's times (default: 1d)",
    )
    windows: int | None = option(
        None,
        "how many windows are trained, with --order time: the last ones before that of the test "
        "part (default: all but the first); with --follow, the run ends after so many",
        minimum=1,
    )
    lateness: str = option(
        "0",
        "how long a window waits for late events, with --follow: it is over when an event has come "
        "that is later than its end by so much, as 5min",
    )
    late: str = option(
        "next",
        "events whose window is over, with --follow: they go to the next window, or are dropped",
        choices=("next", "drop"),
    )
    event_id: str | None = option(
        None, "column with an id of each event, by which --follow finds events that come twice"
    )
    event_id_windows: int = option(
        32, "windows whose --event-id are remembered; older late events are dropped", minimum=1
    )
    avro_schema: str | None = option(
        None, "schema of the values of a topic (--follow kafka://), a file; default: they are JSON"
    )
    new_values: int = option(
        1000, "with --follow, rows of a categorical feature for values that come later", minimum=0
    )
    stop_when_idle: float | None = option(
        None, "with --follow, seconds without an event after which the run ends", above=0.0
    )
    idle_partition: float | None = option(
        None,
        "with --follow kafka://, seconds after which a partition without events does not hold up "
        "the others (default: it does)",
        above=0.0,
    )
    anchor_actions: str = option(
        "", "actions of the candidates, as 1,4, with --order time (ranking; default: all)"
    )
    min_history: int = option(
        1, "events that a candidate has before it, with --order time (ranking)", minimum=1
    )
    history_pools: str = option(
        "",
        "actions that share --max-length evenly, as 1,2,4: a history is the last events of each, "
        "with --order time (ranking; default: the last events)",
    )
    negatives: int | None = option(
        None,
        "negatives of each --negatives-per (retrieval; default: 256 of a sample or position, 1,024 "
        "of a batch; with --negatives-from all: every item)",
        minimum=1,
    )
    negatives_per: str = option(
        "auto",
        "what has its own negatives: each sample, each position, or the batch as a whole (auto: "
        "the batch if histories are short and --negatives is not given, else each sample)",
        choices=("auto", "sample", "position", "batch"),
        formerly="sample",
    )
    negatives_from: str = option(
        "auto",
        "how negatives are drawn: uniform, by popularity in the training data, or all: the full "
        "softmax over the catalogue, nothing is drawn (auto: by popularity if the batch shares "
        "them, else uniform)",
        choices=("auto", "uniform", "popularity", "all"),
        formerly="uniform",
    )
    popularity_power: float = option(
        0.75,
        "power of the counts that items are drawn by, with --negatives-from popularity",
        minimum=0.0,
    )
    in_batch_share: float = option(
        0.0,
        "share of negatives that are targets of other samples of the batch (1: in-batch negatives "
        "alone, less: mixed with --negatives-from)",
        minimum=0.0,
        maximum=1.0,
    )
    log_q: bool | None = option(
        None,
        "subtract the log-probability of its draw from each logit (default: yes, if items are "
        "not drawn uniformly)",
        formerly=False,
    )
    candidates: int = option(8, "candidates of each sample (ranking)", minimum=1)
    shuffle: bool = option(True, "shuffle users, by the seed and the epoch")
    workers: int | None = option(
        None,
        "processes of a rank that make batches ahead (default: 0, a thread, on CPUs; up to 8 on "
        "GPUs, by the cores)",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_columns(self.columns)
        self._check_stream()
        self._check_windows()

    def _check_stream(self) -> None:
        """A stream is read in order of time. Refuses what does not go with one."""
        _ = self.lateness_length
        if self.follow is None:
            if given := self.list_given(OF_STREAM):
                raise ValueError(f"{given[0]} is of --follow: add it, or leave this out")
            return
        if self.data not in ("", self.follow):
            raise ValueError(
                f"--data {self.data} with --follow {self.follow}: all events come from one source; "
                "move the files into the folder that is followed, or leave --data out"
            )
        if self.features == "auto":
            raise ValueError(
                "--features auto with --follow: name the columns and kinds, as channel=categorical"
            )
        object.__setattr__(self, "data", self.follow)
        object.__setattr__(self, "order", "time")

    @property
    def lateness_length(self) -> Duration:
        return parse_duration(self.lateness, "--lateness", 0)

    def _check_windows(self) -> None:
        """Refuses values of windows that are not valid, or do not go with the order."""
        _, _, pools = self.window_length, self.candidate_actions, self.history_pool_actions
        if len(pools) > self.max_length:
            raise ValueError(
                f"--history-pools {self.history_pools} shares --max-length {self.max_length} among "
                f"{len(pools)} actions: each needs an event; make it longer"
            )
        if self.order == "time":
            defaults = {entry.name: entry.default for entry in fields(self)}
            if (self.split, self.split_time) != (defaults["split"], None):
                refuse_split(self.split)
        elif given := self.list_given(OF_TIME):
            raise ValueError(f"{given[0]} is of --order time: add it, or leave this out")

    def list_given(self, names: Sequence[str]) -> list[str]:
        """Of some settings, as options, those that do not have their defaults."""
        found = []
        for entry in fields(self):
            value, flag = getattr(self, entry.name), "--" + entry.name.replace("_", "-")
            found += [f"{flag} {value}"] if entry.name in names and value != entry.default else []
        return found

    @property
    def window_length(self) -> Duration:
        return parse_duration(self.window or DEFAULT_WINDOW)

    @property
    def candidate_actions(self) -> tuple[int, ...]:
        return parse_actions("--anchor-actions", self.anchor_actions)

    @property
    def history_pool_actions(self) -> tuple[int, ...]:
        return parse_actions("--history-pools", self.history_pools)


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
    like: str | None = option(
        None,
        "events in the layout of a published data set, in a folder, with its statistics, planted "
        "preferences and the best AUC that they allow; needs the benchmarks; of the other options "
        "--users, --items, --median, --sigma, --cap, --popularity and --seed count",
        choices=("yambda",),
    )
    hot_album: float = option(
        0.0,
        "share of the events that are of one album (with --like yambda)",
        minimum=0.0,
        maximum=0.3,
    )
    seed: int = option(0, "seed of everything random")

    @property
    def label_names(self) -> tuple[str, ...]:
        return split_names(self.labels)
