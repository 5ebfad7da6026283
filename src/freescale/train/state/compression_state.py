"""What a schedule's reducer carries from step to step, in a checkpoint, by parameter name: of
compression, each rank's own errors and thresholds; of exact sums, the order of the buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from freescale.pipeline.dense.reducer import Reducer
from freescale.pipeline.dense.thresholded import ThresholdedGradients

State = dict[nn.Parameter, dict[str, Tensor]]


class CompressionState:
    """Of a schedule's reducer; of one that carries nothing, nothing. `names` are the parameters',
    by identity."""

    def __init__(self, reducer: Reducer | None, names: Mapping[int, str]) -> None:
        self._reducer = reducer if isinstance(reducer, ThresholdedGradients) else None
        self._state: State = self._reducer.state if self._reducer is not None else {}
        self._name = {parameter: names[id(parameter)] for parameter in self._state}
        self._saved: list[State] = []

    @property
    def names(self) -> list[str]:
        return sorted(self._name.values())

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """To be saved by this rank."""
        return self._named(self._state, rank)

    def allocate(
        self, saved: Iterable[str], rank: int, world: int, ranks: int
    ) -> dict[str, Tensor]:
        """To be read by this rank, of `world`, from what `ranks` ranks saved of the parameters
        `saved`: every old rank's state falls to exactly one of the new ones."""
        known = set(saved)
        mine = {
            parameter: entries
            for parameter, entries in self._state.items()
            if self._name[parameter] in known
        }
        tensors: dict[str, Tensor] = {}
        for old in range(rank, ranks, world):
            copy = {
                parameter: {key: torch.empty_like(value) for key, value in entries.items()}
                for parameter, entries in mine.items()
            }
            self._saved.append(copy)
            tensors |= self._named(copy, old)
        return tensors

    def restore(self, same_ranks: bool) -> None:
        """What was read becomes the reducer's; where nothing had been saved, it begins without
        errors."""
        if self._reducer is not None:
            self._reducer.adopt(self._saved, same_ranks)

    def _named(self, state: State, rank: int) -> dict[str, Tensor]:
        return {
            f"carried/{rank}/{self._name[parameter]}/{key}": value
            for parameter, entries in state.items()
            for key, value in entries.items()
        }
