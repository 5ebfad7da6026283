"""All settings of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from freescale.config.columns import Label, parse_labels
from freescale.config.data import OF_RANKING, DataConfig
from freescale.config.features import KEPT_SCHEMA
from freescale.config.metrics import REPEATS, describe_metrics, list_metrics
from freescale.config.model import ModelConfig
from freescale.config.options import split_names
from freescale.config.origin import Origin
from freescale.config.recipe import expand_recipe
from freescale.config.time_order import refuse_split
from freescale.config.train import TrainConfig, parse_split


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run; `config.json` of its folder."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    origin: Origin | None = None  # the run that this one continues

    def __post_init__(self) -> None:
        if not self.data.data:
            raise ValueError("--data is missing: name a file of histories or interactions")
        self._check_follow()
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
        _ = self.task_weights
        self._check_best()
        self._check_rows()
        self._check_split()
        self._check_time_order()

    def _check_follow(self) -> None:
        """Refuses what a run without an end, and with ids that are not known yet, does not have."""
        if self.data.follow is None:
            return
        if "item" not in self.dynamic_tables:
            raise ValueError(
                "--follow needs a dynamic table, whose items come and go: --rows item=dynamic:1M "
                "has room for a million"
            )
        if self.train.decay != "constant":
            raise ValueError(
                f"--decay {self.train.decay} with --follow: the run has no last step that the rate "
                "falls to; leave it out"
            )

    def _check_time_order(self) -> None:
        """Refuses settings that do not go with samples in order of time."""
        data, train = self.data, self.train
        if data.order != "time":
            return
        if self.model.task != "ranking" and (given := data.list_given(OF_RANKING)):
            raise ValueError(f"{given[0]} is of --task ranking: leave it out")
        if train.keep == "best" or train.patience is not None:
            option = "--keep best" if train.keep == "best" else "--patience"
            raise ValueError(
                f"{option} with --order time: every window is evaluated once, before it is "
                "trained, and the last model is the one for what comes next; leave it out"
            )
        if self.origin is not None and data.follow is not None:
            raise ValueError(
                "--from with --follow: a run that follows a source goes on by itself; resume it "
                "(--resume), or leave --follow out"
            )

    def _check_split(self) -> None:
        """Refuses to divide histories with settings that do not go with it."""
        model, train = self.model, self.train
        if parse_split(train.split_histories) == "off":
            return
        refused = {
            "--encoder sasrec: its softmax is no plain sum over keys": model.encoder == "sasrec",
            "--head dlrm: positions are counted from the end": model.head == "dlrm",
            "--balance none: the balancer divides them": train.balance == "none",
            "--balance-adapt: measured times have waits for other ranks": train.balance_adapt,
        }
        for why in (why for why, given in refused.items() if given):
            raise ValueError(
                f"--split-histories {train.split_histories} does not go with {why}; leave one out"
            )

    def _check_best(self) -> None:
        """Refuses to compare evaluations that are not made or lack the metric."""
        train = self.train
        option = "--keep best" if train.keep == "best" else "--patience"
        if train.keep == "best" or train.patience is not None:
            if train.evaluate_every is None:
                raise ValueError(
                    f"{option} needs --evaluate-every, the epochs between two evaluations"
                )
            if self.data.split == "none":
                raise ValueError(f"{option} needs a validation part, which --split none has not")
        about, metric = (self.model.task, self.label_names), train.keep_metric
        if metric is not None and metric not in set(list_metrics(*about)) - {REPEATS}:
            raise ValueError(
                f"--keep-metric {metric} is no metric of {self.model.task} that gets better; there "
                f"is {describe_metrics(*about)}"
            )

    def _check_rows(self) -> None:
        """Refuses negatives that need a catalogue if there is none."""
        for part in self.train.rows.split(",") if self.train.rows else ():
            name, _, choice = part.partition("=")
            if not name.strip() or not choice.strip():
                raise ValueError(f"--rows {part!r} names no table and choice: item=dynamic:50M")
        if "item" in self.dynamic_tables and self.data.num_items is not None:
            raise ValueError(
                f"--num-items {self.data.num_items} with --rows {self.train.rows}: ids of a "
                "dynamic table have no bound; leave --num-items out"
            )
        if self.model.task == "retrieval" and "item" in self.dynamic_tables:
            self._check_negatives()

    def _check_negatives(self) -> None:
        """Takes the negatives of a dynamic table from the batch. Refuses other sources."""
        data = self.data
        if data.negatives_from == "auto" and data.in_batch_share == DataConfig.in_batch_share:
            object.__setattr__(self, "data", replace(data, in_batch_share=1.0))
        elif data.in_batch_share < 1:
            source = "uniform" if data.negatives_from == "auto" else data.negatives_from
            raise ValueError(
                f"--rows {self.train.rows}: a dynamic table has no catalogue, which negatives from "
                f"--negatives-from {source} are drawn from; take those of the batch, "
                "--in-batch-share 1"
            )

    @property
    def dynamic_tables(self) -> dict[str, str]:
        """--rows by table: {"item": "dynamic:50M"}."""
        parts = (part.split("=", 1) for part in self.train.rows.split(",") if part)
        return {name.strip(): choice.strip() for name, choice in parts}

    @property
    def known_rows(self) -> dict[str, int]:
        """Rows that tables have at least: those of the run that this one continues."""
        return self.origin.rows if self.origin is not None else {}

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def task_weights(self) -> dict[str, float]:
        """--task-weights by label. ValueError if one is not valid."""
        found: dict[str, float] = {}
        for part in split_names(self.train.task_weights or ""):
            name, _, value = map(str.strip, part.partition("="))
            if name not in self.label_names or name in found:
                named = ", ".join(self.label_names) or "none"
                raise ValueError(f"--task-weights has {part!r}; name each label once, of: {named}")
            if not re.fullmatch(r"\d+\.?\d*", value):
                raise ValueError(f"--task-weights has {part!r}; write a number, as buy=0.5")
            found[name] = float(value)
        return found

    @property
    def labels(self) -> tuple[Label, ...]:
        return parse_labels(self.model.labels)

    @property
    def placements(self) -> str | dict[str, str]:
        """--placement for `parallelize`: `auto`, or `item=host:8GB,action=replicated` as a dict."""
        if "=" not in self.train.placement:
            return self.train.placement
        parts = (part.split("=", 1) for part in self.train.placement.split(","))
        return {name.strip(): choice.strip() for name, choice in parts}

    @staticmethod
    def from_settings(given: Mapping[str, Any], base: RunConfig | None = None) -> RunConfig:
        """Makes a configuration from settings by name.

        Args:
            given: values by name, as for `freescale train`: {"data": "histories.parquet",
                "steps": 100}. None means not given. A "recipe" supplies settings that are not
                given.
            base: supplies all other settings; without it their defaults do.

        Raises:
            ValueError: if a setting does not exist, or a value is out of its limits.
        """
        known = {entry.name for kind in _PARTS.values() for entry in fields(kind)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"unknown settings: {', '.join(unknown)}")
        given = expand_recipe(given)
        order = given.get("order") or (base.data.order if base else None)
        if given.get("follow"):
            order, given = "time", {"data": given["follow"], **given}
        if order == "time" and given.get("split") is not None:
            refuse_split(given["split"])
        parts: dict[str, Any] = {}
        for part, kind in _PARTS.items():
            names = [entry.name for entry in fields(kind)]
            values = {name: given[name] for name in names if given.get(name) is not None}
            parts[part] = replace(getattr(base, part), **values) if base else kind(**values)
        config = RunConfig(**parts, origin=base.origin if base else None)
        # Runs from before this check still resume.
        if base is None and config.label_names and config.model.task != "ranking":
            raise ValueError(
                f"--labels {config.model.labels} with --task {config.model.task}: labels are of "
                "ranking; add --task ranking, or leave them out"
            )
        return config

    @staticmethod
    def read(folder: Path) -> RunConfig:
        """Reads the settings of a run, with the copies that the folder keeps: of its schema, and of
        what it needs of the run that it continues."""
        config = RunConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
        if config.origin is not None:
            config = replace(config, origin=config.origin.find_kept(folder))
        kept = folder / KEPT_SCHEMA
        if config.data.schema is None or not kept.is_file():
            return config
        return replace(config, data=replace(config.data, schema=str(kept)))

    def to_json(self) -> str:
        parts = asdict(self)
        if self.origin is None:
            del parts["origin"]
        return json.dumps(parts, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> RunConfig:
        """Parses a `config.json`. A missing setting has the value from before it existed.
        ValueError names settings that do not exist, or no longer."""
        raw: Mapping[str, Mapping[str, Any]] = json.loads(text)
        parts: dict[str, Any] = {}
        for part, kind in _PARTS.items():
            given, known = dict(raw.get(part, {})), {entry.name: entry for entry in fields(kind)}
            for switch, settings in _REMOVED.items():
                if given.get(switch) is not None:
                    flag = f"--{switch.replace('_', '-')} {given[switch]}"
                    raise ValueError(f"config.json has {flag}, which was removed: train it anew")
                given = {name: value for name, value in given.items() if name not in settings}
            if unknown := sorted(set(given) - set(known)):
                raise ValueError(
                    f"config.json has unknown settings in {part!r}: {', '.join(unknown)}"
                )
            former = {
                n: e.metadata["formerly"] for n, e in known.items() if "formerly" in e.metadata
            }
            parts[part] = kind(**former | given)
        origin = raw.get("origin")
        return RunConfig(**parts, origin=None if origin is None else Origin(**origin))


_PARTS: dict[str, Any] = {"data": DataConfig, "model": ModelConfig, "train": TrainConfig}
# Settings that were removed, by the one that turned them on: runs without it still load.
_REMOVED = {
    "segment": ("segment", "segment_tokens", "segment_weight", "segment_pooling"),
    "compress_dense": ("compress_dense", "compress_every"),
}
