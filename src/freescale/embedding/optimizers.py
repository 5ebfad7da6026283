"""Row optimizers: lazy (only rows read in the step change), each row once per step.

Each is a small value object: what state a row needs, and how unique rows are updated. `step` is the
global step that made the gradients, from 1; `factor` scales the learning rate; `marks` are those of
changed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from freescale.config import TrainConfig
from freescale.kernels.dispatch.rows import choose_optimizers
from freescale.kernels.row_sums.reference import SortedRows
from freescale.kernels.row_updates.reference import counted_adam

State = dict[str, Tensor]
Rows = Tensor | SortedRows


class RowOptimizer(Protocol):
    @property
    def lr(self) -> float: ...

    @property
    def name(self) -> str: ...

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Trailing shape of each state tensor, by name."""

    def update(
        self,
        weight: Tensor,
        state: State,
        rows: Rows,
        gradients: Tensor,
        *,
        step: int,
        factor: float,
    ) -> None:
        """Updates unique rows [u] of weight [n, width] and state by gradients [u, width]."""


@dataclass(frozen=True)
class LazyOptimizer:
    """What ours have in common: `kernel` of the device that has the table updates its rows."""

    kernel: ClassVar[str]
    lr: float = TrainConfig.row_lr

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"{self.name}: lr must not be negative, got {self.lr}")

    @property
    def name(self) -> str:
        return type(self).__name__

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """As `RowOptimizer.state_shapes`, in the order in which the kernel takes them."""
        return {}

    def _list_options(self, step: int) -> dict[str, Any]:
        """Arguments of the kernel, in addition to the learning rate."""
        return {}

    def _find_kernel(self, weight: Tensor) -> Callable[..., None]:
        found: Callable[..., None] = getattr(choose_optimizers(weight), self.kernel)
        return found

    def update(
        self,
        weight: Tensor,
        state: State,
        rows: Rows,
        gradients: Tensor,
        *,
        step: int,
        factor: float,
        marks: Tensor | None = None,
    ) -> None:
        """As `RowOptimizer.update`. `marks`: for kernels that set them on the way."""
        options = {"lr": self.lr * factor, **self._list_options(step)}
        if marks is not None:
            options["marks"] = marks
        parts = [state[name] for name in self.state_shapes(0)]
        self._find_kernel(weight)(weight, *parts, rows, gradients, **options)


@dataclass(frozen=True)
class SGD(LazyOptimizer):
    """Lazy SGD of table rows: row -= lr * gradient. `lr`: learning rate."""

    kernel = "sgd"


@dataclass(frozen=True)
class Adagrad(LazyOptimizer):
    """Lazy Adagrad of table rows, with a sum of squares for each entry. `lr`: learning rate; `eps`
    is added to the root."""

    kernel = "adagrad"
    eps: float = 1e-10

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (width,)}

    def _list_options(self, step: int) -> dict[str, Any]:
        return {"eps": self.eps}


@dataclass(frozen=True)
class RowWiseAdagrad(LazyOptimizer):
    """Lazy Adagrad of table rows with one sum of squares per row, which saves memory. `lr`:
    learning rate; `eps` is added to the root."""

    kernel = "rowwise_adagrad"
    eps: float = 1e-10

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"sum": ()}

    def _list_options(self, step: int) -> dict[str, Any]:
        return {"eps": self.eps}


@dataclass(frozen=True)
class Adam(LazyOptimizer):
    """Lazy Adam of table rows: only rows that a step read change, bias correction goes by the step.
    `lr`: learning rate; `betas`: decay of the two moments; `eps` is added to the root."""

    kernel = "adam"
    betas: tuple[float, float] = (TrainConfig.beta1, TrainConfig.beta2)
    eps: float = 1e-8

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"first": (width,), "second": (width,)}

    def _list_options(self, step: int) -> dict[str, Any]:
        return {"betas": self.betas, "eps": self.eps, "step": step}


@dataclass(frozen=True)
class CountedAdam(Adam):
    """Lazy Adam of table rows whose bias correction goes by the number of updates of the row
    itself, as of a parameter of its own: the first update of a row that comes late is as large as
    any. Two more numbers a row; in plain torch. Arguments are those of `Adam`."""

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return super().state_shapes(width) | {"correction": (2,)}

    def _list_options(self, step: int) -> dict[str, Any]:
        return {"betas": self.betas, "eps": self.eps}

    def _find_kernel(self, weight: Tensor) -> Callable[..., None]:
        return counted_adam


def has_kernel(optimizer: RowOptimizer) -> bool:
    """Whether the optimizer is one of ours that has a kernel, not plain torch alone."""
    is_ours = getattr(type(optimizer), "update", None) is LazyOptimizer.update
    return is_ours and not isinstance(optimizer, CountedAdam)


ROW_OPTIMIZERS = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
    "counted_adam": CountedAdam,
}


def choose_row_optimizer(train: TrainConfig) -> RowOptimizer:
    """The optimizer of table rows. ValueError if it has none of the settings that are given."""
    optimizer: RowOptimizer = ROW_OPTIMIZERS[train.row_optimizer](lr=train.row_lr)
    if isinstance(optimizer, Adam):
        optimizer = replace(optimizer, betas=(train.beta1, train.beta2))
    if train.row_eps is None:
        return optimizer
    if not isinstance(optimizer, Adam | Adagrad | RowWiseAdagrad):
        raise ValueError(
            f"--row-eps {train.row_eps:g} with --row-optimizer {train.row_optimizer}, which has no "
            "such number: leave it out"
        )
    return replace(optimizer, eps=train.row_eps)
