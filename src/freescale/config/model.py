"""Settings of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from freescale.config.options import Checked, option
from freescale.visible import Visible


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The shape of the model. Every field is an option of `freescale train`."""

    heading: ClassVar[str] = "Model"

    recipe: str | None = option(
        None,
        "settings by name (`list` shows them), or a .toml file of your own; options given with "
        "it take precedence",
        common=True,
    )
    task: str = option("retrieval", "what to train", choices=("retrieval", "ranking"), common=True)
    labels: str = option(
        "",
        "labels of the ranking tasks, comma-separated: columns of 0 and 1, or comparisons with a "
        "name (like=rating>=4)",
        common=True,
    )
    head: str = option(
        "linear",
        "how a ranking model reads and judges: rows of an event summed, and a linear layer; or as "
        "MLPerf's dlrm_v4_hstu, features side by side and small networks",
        choices=("linear", "dlrm"),
    )
    input_hidden: int | None = option(
        None,
        "width inside the networks before the encoder, with --head dlrm (default: half of --width)",
        minimum=1,
    )
    head_hidden: int | None = option(
        None,
        "width inside the networks after the encoder, with --head dlrm (default: --width)",
        minimum=1,
    )
    positions: int | None = option(
        None,
        "positions that differ, counted from the candidate, with --head dlrm (default: all)",
        minimum=1,
    )
    time_buckets: int = option(
        2048, "buckets of the time before a request, by the root of its minutes, with --head dlrm",
        minimum=1,
    )  # fmt: skip
    encoder: str = option("hstu", "what reads the history", choices=("hstu", "sasrec"))
    width: int = option(64, "width of embeddings and layers", minimum=1, common=True)
    hidden: int | None = option(
        None, "width inside SASRec's feed-forward networks (default: --width)", minimum=1
    )
    layers: int = option(2, "layers of the encoder", minimum=1, common=True)
    heads: int = option(2, "attention heads", minimum=1)
    dropout: float = option(0.1, "dropout, keyed by the sample", minimum=0.0, maximum=0.99)
    input_dropout: float | None = option(
        None,
        "dropout of what the first layer reads (default: --dropout)",
        minimum=0.0,
        maximum=0.99,
        formerly=0.0,
    )
    input_scale: float | None = option(
        None,
        "factor of table rows as inputs, before positions are added (default: the square root of "
        "the width)",
        above=0.0,
        formerly=1.0,
    )
    row_std: float | None = option(
        0.02,
        "standard deviation of the first values of table rows",
        above=0.0,
        formerly=None,  # 1 / sqrt(width)
    )
    position_bias: bool | None = option(
        None, "relative position bias in attention, with --encoder hstu  [default: on]"
    )
    time_bias: bool | None = option(
        None, "relative time bias in attention, with --encoder hstu  [default: on]"
    )
    attend: str | None = option(
        None,
        "what an event sees of the history before it: first=64,last=1024 for its first 64 and the "
        "last 1,024 events, itself among them (default: all)",
    )
    temperature: float = option(0.1, "softmax temperature (retrieval)", above=0.0)
    recompute: bool = option(
        False, "activation checkpointing: recompute layers in backward to save memory"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("position_bias", "time_bias"):
            if getattr(self, name) is None:  # follows the encoder and the head
                follows = self.encoder == "hstu" and self.head != "dlrm"
                object.__setattr__(self, name, follows)
        owners = {
            "--position-bias": ("hstu", self.position_bias),
            "--time-bias": ("hstu", self.time_bias),
            "--hidden": ("sasrec", self.hidden is not None),
        }
        for flag, (owner, given) in owners.items():
            if given and owner != self.encoder:
                raise ValueError(
                    f"--encoder {self.encoder} has no {flag}: leave it out, or choose "
                    f"--encoder {owner}"
                )
        if self.attend is not None:
            Visible.parse(self.attend)
        if self.head == "dlrm":
            self._check_dlrm()
        else:
            self._refuse_sizes_of_dlrm()

    @property
    def visible(self) -> Visible | None:
        return None if self.attend is None else Visible.parse(self.attend)

    def _check_dlrm(self) -> None:
        if self.task != "ranking":
            raise ValueError("--head dlrm judges candidates: give --task ranking with it")
        given = {
            "--encoder sasrec": self.encoder != "hstu",
            "--position-bias": self.position_bias,
            "--time-bias": self.time_bias,
            "--attend": self.attend is not None,
        }
        for flag, there in given.items():
            if there:
                raise ValueError(
                    f"--head dlrm has an encoder of its own kind, without {flag}: leave it out"
                )

    def _refuse_sizes_of_dlrm(self) -> None:
        for name in ("input_hidden", "head_hidden", "positions", "time_buckets"):
            if getattr(self, name) != getattr(type(self), name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} is for --head dlrm: leave it out, or choose that head")
