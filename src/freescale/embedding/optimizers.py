"""Row optimizers: lazy (only rows read in the step change), each row once per step.

Each is a small value object: what state a row needs, and how a set of unique rows is updated.
`step` is the global step that made the gradients, counted from 1; `factor` scales the learning rate
(its schedule). `marks` are those of changed rows, for tables whose kernels set them on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from freescale.config import TrainConfig
from freescale.kernels.row_sums.reference import SortedRows
from freescale.kernels.row_updates.reference import counted_adam
from freescale.kernels.rows.dispatch import choose_optimizers


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
        state: dict[str, Tensor],
        rows: Tensor | SortedRows,
        gradients: Tensor,
        *,
        step: int,
        factor: float,
    ) -> None:
        """Updates unique rows [u] of weight [n, width] and of the state, in place, by their
        gradients [u, width]."""


@dataclass(frozen=True)
class _Named:
    lr: float = TrainConfig.row_lr

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"{self.name}: lr must not be negative, got {self.lr}")

    @property
    def name(self) -> str:
        return type(self).__name__


def _pass_on(marks: Tensor | None) -> dict[str, Tensor]:
    """As an argument of kernels that know it."""
    return {} if marks is None else {"marks": marks}


@dataclass(frozen=True)
class SGD(_Named):
    """Lazy SGD of table rows: row -= lr * gradient. `lr`: learning rate."""

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {}

    def update(
        self,
        weight: Tensor,
        state: dict[str, Tensor],
        rows: Tensor | SortedRows,
        gradients: Tensor,
        *,
        step: int,
        factor: float,
        marks: Tensor | None = None,
    ) -> None:
        choose_optimizers(weight).sgd(
            weight, rows, gradients, lr=self.lr * factor, **_pass_on(marks)
        )


@dataclass(frozen=True)
class Adagrad(_Named):
    """Lazy Adagrad of table rows, with a sum of squares for each entry. `lr`: learning rate; `eps`
    is added to the root."""

    eps: float = 1e-10

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"sum": (width,)}

    def update(
        self,
        weight: Tensor,
        state: dict[str, Tensor],
        rows: Tensor | SortedRows,
        gradients: Tensor,
        *,
        step: int,
        factor: float,
        marks: Tensor | None = None,
    ) -> None:
        options = {"lr": self.lr * factor, "eps": self.eps, **_pass_on(marks)}
        choose_optimizers(weight).adagrad(weight, state["sum"], rows, gradients, **options)


@dataclass(frozen=True)
class RowWiseAdagrad(_Named):
    """Lazy Adagrad of table rows with one sum of squares per row, which saves memory. `lr`:
    learning rate; `eps` is added to the root."""

    eps: float = 1e-10

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"sum": ()}

    def update(
        self,
        weight: Tensor,
        state: dict[str, Tensor],
        rows: Tensor | SortedRows,
        gradients: Tensor,
        *,
        step: int,
        factor: float,
        marks: Tensor | None = None,
    ) -> None:
        options = {"lr": self.lr * factor, "eps": self.eps, **_pass_on(marks)}
        choose_optimizers(weight).rowwise_adagrad(weight, state["sum"], rows, gradients, **options)


@dataclass(frozen=True)
class Adam(_Named):
    """Lazy Adam of table rows: only rows that a step read change, bias correction goes by the step.
    `lr`: learning rate; `betas`: decay of the two moments; `eps` is added to the root."""

    betas: tuple[float, float] = (0.9, TrainConfig.beta2)
    eps: float = 1e-8

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"first": (width,), "second": (width,)}

    def update(
        self,
        weight: Tensor,
        state: dict[str, Tensor],
        rows: Tensor | SortedRows,
        gradients: Tensor,
        *,
        step: int,
        factor: float,
        marks: Tensor | None = None,
    ) -> None:
        choose_optimizers(weight).adam(
            weight,
            state["first"],
            state["second"],
            rows,
            gradients,
            lr=self.lr * factor,
            betas=self.betas,
            eps=self.eps,
            step=step,
            **_pass_on(marks),
        )


@dataclass(frozen=True)
class CountedAdam(Adam):
    """Lazy Adam of table rows whose bias correction goes by the number of updates of the row
    itself: what Adam does to a parameter of its own. The first update of a row that comes late is
    as large as that of one which was there from the beginning. Two more numbers a row; in plain
    torch. Arguments are those of `Adam`."""

    def state_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return super().state_shapes(width) | {"correction": (2,)}

    def update(
        self,
        weight: Tensor,
        state: dict[str, Tensor],
        rows: Tensor | SortedRows,
        gradients: Tensor,
        *,
        step: int,
        factor: float,
        marks: Tensor | None = None,
    ) -> None:
        assert isinstance(rows, Tensor) and marks is None
        counted_adam(
            weight,
            state["first"],
            state["second"],
            state["correction"],
            rows,
            gradients,
            lr=self.lr * factor,
            betas=self.betas,
            eps=self.eps,
        )


ROW_OPTIMIZERS = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
    "counted_adam": CountedAdam,
}
