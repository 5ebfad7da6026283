"""What a sample costs: a * L^2 + b * L + c * candidates + d, from the model's shapes.

Frozen by default, so that assignments depend on the data alone and a resumed run repeats them.
`AdaptiveCost` corrects the coefficients by measured times instead; its state belongs into a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freescale.visible import Visible


@dataclass(frozen=True)
class CostModel:
    """What a sample costs: quadratic * L^2 + linear * L + candidate * candidates + constant.

    L is the length of the balancer's feature. The unit does not matter: only ratios enter an
    assignment. `CostModel.of_hstu` and `CostModel.of_sasrec` count the operations of an encoder.

    Args:
        quadratic: attention between the events of a sample.
        linear: what an event costs whatever the others are.
        candidate: what a candidate of a ranking model costs.
        constant: what a sample costs, however long.
        visible: what an event attends to; twice the pairs of events then replace L^2.

    Raises:
        ValueError: a coefficient is negative or not finite, or all are 0.
    """

    quadratic: float
    linear: float
    candidate: float = 0.0
    constant: float = 0.0
    visible: Visible | None = None

    def __post_init__(self) -> None:
        values = np.array(self.coefficients)
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise ValueError(
                "cost coefficients must be finite, not negative and not all zero, "
                f"got {self.coefficients}"
            )

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        return (self.quadratic, self.linear, self.candidate, self.constant)

    def __call__(
        self, lengths: NDArray[Any], candidates: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """lengths [n], candidates [n] -> costs [n] float64."""
        return self.of(self.measure(lengths, candidates))

    def measure(
        self, lengths: NDArray[Any], candidates: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """[n, 4]: what the coefficients multiply: L^2, L, candidates, 1."""
        rows = features(lengths, candidates)
        if self.visible is not None:
            rows[:, 0] = square(rows[:, 1], self.visible)
        return rows

    def of(self, rows: NDArray[Any]) -> NDArray[Any]:
        """rows [n, 4] of `measure` -> costs [n] float64."""
        return _product(rows, np.array(self.coefficients))

    def with_prefix(self, tokens: int) -> CostModel:
        """The cost if each sample has so many tokens before its history, which all others see."""
        return replace(
            self,
            linear=self.linear + 2 * tokens * self.quadratic,
            constant=self.constant + tokens * (self.candidate + tokens * self.quadratic),
        )

    @staticmethod
    def balanced_at(length: float) -> CostModel:
        """The model whose quadratic and linear terms are equal at this length."""
        return CostModel(1.0, float(length))

    @staticmethod
    def of_hstu(
        *,
        width: int,
        layers: int,
        heads: int,
        d_qk: int,
        d_v: int,
        negatives: int = 0,
        tasks: int = 0,
        wide: bool = False,
        inputs: int = 0,
    ) -> CostModel:
        """Floating-point operations of forward and backward (three times forward), per sample.

        Args:
            wide: whether the output projection reads three parts (`HSTULayer`).
            inputs: weights of the networks that make a token of an event.
        """
        # per pair of positions that see each other: half of L^2, 2 operations each
        attention = layers * heads * (d_qk + d_v)
        read = (3 if wide else 1) * heads * d_v
        projections = layers * 2 * width * (2 * heads * (d_qk + d_v) + read) + 2 * inputs
        return CostModel._of_layers(attention, projections, width, negatives, tasks)

    @staticmethod
    def of_sasrec(
        *, width: int, layers: int, hidden: int | None = None, negatives: int = 0, tasks: int = 0
    ) -> CostModel:
        """As `of_hstu`, for SASRec with `hidden` (default: `width`) feed-forward columns."""
        inside = width if hidden is None else hidden
        projections = layers * 2 * width * (4 * width + 2 * inside)
        return CostModel._of_layers(layers * 2 * width, projections, width, negatives, tasks)

    @staticmethod
    def _of_layers(
        attention: int, projections: int, width: int, negatives: int, tasks: int
    ) -> CostModel:
        """From the forward operations per pair of events and per event, over all layers."""
        return CostModel(
            quadratic=3.0 * attention,
            linear=3.0 * (projections + 2 * negatives * width),
            # The token count in L^2 covers a candidate's attention; this is its projections.
            candidate=3.0 * (projections + 2 * tasks * width),
        )


def square(lengths: NDArray[Any], visible: Visible | None) -> NDArray[Any]:
    """L^2 of lengths [n], or twice the pairs of events that see each other."""
    found: NDArray[Any] = lengths * lengths if visible is None else 2 * visible.count_pairs(lengths)
    return found


def features(lengths: NDArray[Any], candidates: NDArray[Any] | None = None) -> NDArray[Any]:
    """[n, 4]: L^2, L, candidates, 1."""
    length = np.asarray(lengths, dtype=np.float64)
    count = (
        np.zeros_like(length) if candidates is None else np.asarray(candidates, dtype=np.float64)
    )
    return np.stack([length * length, length, count, np.ones_like(length)], axis=1)


def _product(rows: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """rows [n, k] times weights [k], term by term from the left: a matrix product may round
    differently on another processor, and ranks would assign differently."""
    total: NDArray[np.float64] = rows[:, 0] * weights[0]
    for column in range(1, rows.shape[1]):
        total = total + rows[:, column] * weights[column]
    return total


# weight of the initial proportions against one measurement: a guess, soon outweighed
_START = 1e-3
_HELD = 1e-6
_HOLD = _HELD * np.eye(5)


class AdaptiveCost:
    """Recursive least squares of step times on the summed features of what each rank computed.

    Everything that enters `update` is gathered from all ranks, so that all of them keep the same
    coefficients. Features are scaled by their size at the start, since the terms differ by many
    orders of magnitude. A fifth feature, 1 for each rank that computed anything, is the fixed cost
    of a step; it does not enter an assignment. The information form of the recursion makes a step
    cost the same however many ranks measured it.
    """

    def __init__(self, start: CostModel, forgetting: float = 0.96) -> None:
        """`forgetting`: what is left of a step's weight one step later."""
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting must be above 0 and at most 1, got {forgetting}")
        self.start, self.forgetting = start, forgetting
        self._scale: NDArray[Any] | None = None  # [5]: feature sizes at the first update
        self._weights = np.zeros(5)  # of the scaled features: seconds
        self._information = np.zeros((5, 5))  # sum of x x^T over what was measured, fading
        self._moment = np.zeros(5)  # sum of x * seconds

    @property
    def calibrated(self) -> bool:
        """Whether predictions are in seconds, after a measurement."""
        return self._scale is not None

    @property
    def model(self) -> CostModel:
        """Current coefficients; negative ones (noise) are 0. Before the first update, the initial
        ones."""
        if self._scale is None:
            return self.start
        coefficients = np.maximum(self._weights, 0.0)[:4] / self._scale[:4]
        return CostModel(*coefficients.tolist()) if coefficients.any() else self.start

    def predict(self, summed: NDArray[Any]) -> NDArray[Any]:
        """summed [ranks, 4]: features of each rank's samples -> seconds [ranks]. Needs
        calibration."""
        assert self._scale is not None
        return _product(_with_constant(summed) / self._scale, self._weights)

    def update(self, summed: NDArray[Any], seconds: NDArray[Any]) -> None:
        """Updates with summed [ranks, 4] and measured seconds [ranks] of a step; 0: not
        measured."""
        summed, seconds = np.asarray(summed, np.float64), np.asarray(seconds, np.float64)
        if not np.isfinite(seconds).all() or (seconds < 0).any():
            raise ValueError(f"step times must be finite and not negative, got {seconds.tolist()}")
        busy = (summed[:, 3] > 0) & (seconds > 0)
        if not busy.any():
            return
        summed, seconds = summed[busy], seconds[busy]
        if self._scale is None:
            self._begin(summed, seconds)
        assert self._scale is not None
        rows = _with_constant(summed) / self._scale
        # Sums along the first axis add row by row, in the same order on every machine.
        self._information = self.forgetting * self._information + (
            rows[:, :, None] * rows[:, None, :]
        ).sum(axis=0)
        self._moment = self.forgetting * self._moment + (rows * seconds[:, None]).sum(axis=0)
        # Features without information (always zero) keep their weights.
        self._weights = np.array(
            _solve(
                (self._information + _HOLD).tolist(),
                (self._moment + _HELD * self._weights).tolist(),
            )
        )

    def _begin(self, summed: NDArray[Any], seconds: NDArray[Any]) -> None:
        """Scales the initial proportions to the first measurement, which gives the unit of time."""
        self._scale = np.maximum(_with_constant(summed).mean(axis=0), 1e-30)
        weights = np.append(self.start.coefficients, 0.0) * self._scale
        self._weights = weights * (
            seconds.sum() / _product(_with_constant(summed) / self._scale, weights).sum()
        )
        self._information = np.eye(5) * _START
        self._moment = _START * self._weights

    def state_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        scale = None if self._scale is None else self._scale.tolist()
        known = {"weights": self._weights, "information": self._information, "moment": self._moment}
        return {"scale": scale} | {name: value.tolist() for name, value in known.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scale = None if state["scale"] is None else np.array(state["scale"])
        self._weights, self._information, self._moment = (
            np.array(state[n]) for n in ("weights", "information", "moment")
        )


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a symmetric positive system [k][k] in Python floats: the same bits on every
    machine."""
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            matrix[row] = [
                below - factor * above
                for below, above in zip(matrix[row], matrix[pivot], strict=True)
            ]
            right[row] -= factor * right[pivot]
    solution = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(matrix[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (right[row] - rest) / matrix[row][row]
    return solution


def _with_constant(summed: NDArray[Any]) -> NDArray[Any]:
    """[ranks, 4] -> [ranks, 5]."""
    rows = np.empty((len(summed), 5))
    rows[:, :4] = summed
    np.greater(summed[:, 3], 0, out=rows[:, 4])
    return rows
