"""What a sample costs: a * L^2 + b * L + c * candidates + d, from the model's shapes.

Frozen by default, so that assignments depend on the data alone and a resumed run repeats them. `AdaptiveCost` corrects the
coefficients by measured times instead; its state belongs into a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CostModel:
    """Coefficients of the features [L^2, L, candidates, 1]. The unit does not matter: only ratios enter an assignment."""

    quadratic: float
    linear: float
    candidate: float = 0.0
    constant: float = 0.0

    def __post_init__(self) -> None:
        values = np.array(self.coefficients)
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise ValueError(f"cost coefficients must be finite, not negative and not all zero, got {self.coefficients}")

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        return (self.quadratic, self.linear, self.candidate, self.constant)

    def __call__(self, lengths: np.ndarray, candidates: np.ndarray | None = None) -> np.ndarray:
        """lengths [n], candidates [n] -> costs [n] float64."""
        return features(lengths, candidates) @ np.array(self.coefficients)

    @staticmethod
    def balanced_at(length: float) -> CostModel:
        """Quadratic and linear terms are equal at this length."""
        return CostModel(1.0, float(length))

    @staticmethod
    def of_hstu(*, width: int, layers: int, heads: int, d_qk: int, d_v: int, negatives: int = 0, tasks: int = 0) -> CostModel:
        """Floating-point operations of forward and backward (three times forward), per sample."""
        attention = layers * heads * (d_qk + d_v)  # per pair of positions that see each other: half of L^2, 2 operations each
        projections = layers * 2 * width * (2 * heads * (d_qk + d_v) + heads * d_v)
        return CostModel(
            quadratic=3.0 * attention,
            linear=3.0 * (projections + 2 * negatives * width),
            # A candidate is a token that sees the history: its projections; its attention is in L^2 by the token count.
            candidate=3.0 * (projections + 2 * tasks * width),
        )


def features(lengths: np.ndarray, candidates: np.ndarray | None = None) -> np.ndarray:
    """[n, 4]: L^2, L, candidates, 1."""
    length = np.asarray(lengths, dtype=np.float64)
    count = np.zeros_like(length) if candidates is None else np.asarray(candidates, dtype=np.float64)
    return np.stack([length * length, length, count, np.ones_like(length)], axis=1)


class AdaptiveCost:
    """Recursive least squares of step times on the summed features of what each rank computed.

    Everything that enters `update` is gathered from all ranks, so that all of them keep the same coefficients. Times are compared
    after scaling each feature by its size at the start: the terms differ by many orders of magnitude.
    """

    def __init__(self, start: CostModel, forgetting: float = 0.98) -> None:
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting must be above 0 and at most 1, got {forgetting}")
        self.start, self.forgetting = start, forgetting
        self._scale: np.ndarray | None = None  # [4]: feature sizes at the first update
        self._weights = np.zeros(4)  # of the scaled features: seconds
        self._covariance = np.eye(4)
        self.error: float | None = None  # of the last prediction: median over ranks of |predicted - measured| / measured

    @property
    def model(self) -> CostModel:
        """The present coefficients. Negative ones (noise) count as zero; before the first update, what it started from."""
        if self._scale is None:
            return self.start
        coefficients = np.maximum(self._weights, 0.0) / self._scale
        return CostModel(*coefficients) if coefficients.any() else self.start

    def predict(self, summed: np.ndarray) -> np.ndarray:
        """summed [ranks, 4]: features added up over each rank's samples -> seconds [ranks]. The constant counts samples."""
        if self._scale is None:
            return summed @ np.array(self.start.coefficients)
        return summed / self._scale @ self._weights

    def update(self, summed: np.ndarray, seconds: np.ndarray) -> None:
        """summed [ranks, 4] and measured seconds [ranks] of the last step, in rank order."""
        summed, seconds = np.asarray(summed, np.float64), np.asarray(seconds, np.float64)
        if not np.isfinite(summed).all() or not np.isfinite(seconds).all() or (seconds < 0).any():
            raise ValueError(f"step times must be finite and not negative, got {seconds.tolist()}")
        busy = (summed[:, 3] > 0) & (seconds > 0)
        if not busy.any():
            return
        summed, seconds = summed[busy], seconds[busy]
        if self._scale is None:
            self._begin(summed, seconds)
        assert self._scale is not None
        self.error = float(np.median(np.abs(self.predict(summed) - seconds) / seconds))
        for features_of_rank, time in zip(summed / self._scale, seconds, strict=True):
            gain = self._covariance @ features_of_rank
            gain /= self.forgetting + features_of_rank @ gain
            self._weights = self._weights + gain * (time - features_of_rank @ self._weights)
            self._covariance = (self._covariance - np.outer(gain, features_of_rank @ self._covariance)) / self.forgetting

    def _begin(self, summed: np.ndarray, seconds: np.ndarray) -> None:
        """The unit of time is unknown before the first measurement: the start's proportions, scaled to it."""
        self._scale = np.maximum(summed.mean(axis=0), 1e-30)
        weights = np.array(self.start.coefficients) * self._scale
        self._weights = weights * seconds.sum() / (summed / self._scale @ weights).sum()
        self._covariance = np.eye(4) * 10.0

    def state_dict(self) -> dict:
        """Plain data, for a checkpoint."""
        scale = None if self._scale is None else self._scale.tolist()
        return {"scale": scale, "weights": self._weights.tolist(), "covariance": self._covariance.tolist()}

    def load_state_dict(self, state: dict) -> None:
        self._scale = None if state["scale"] is None else np.array(state["scale"])
        self._weights, self._covariance = np.array(state["weights"]), np.array(state["covariance"])
