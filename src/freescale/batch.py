"""Batches of sequences: jagged features, two-level candidates, per-sample columns.

A sample is one user's history with everything that belongs to it. All moves (select, split, concat)
work on whole samples, by index arithmetic and without a Python loop over samples, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from freescale.sequences import HostSizes, Jagged, Nested, compute_offsets, concat_ranges

__all__ = [
    "HostSizes",
    "Jagged",
    "Nested",
    "SequenceBatch",
    "check_is_batch",
    "compute_offsets",
    "concat_ranges",
]


@dataclass(frozen=True)
class SequenceBatch:
    """Some samples, feature by feature. Every feature has the same number of samples.

    `weights` holds the supervised weight of each sample, per task: what a task's summed loss is
    divided by, once it is added up over all ranks. `keys` are the samples' random keys, a function
    of (seed, step, sample): whatever is random about a sample (dropout, negatives) is drawn from
    its key, so that it does not matter where it is computed.
    """

    sequences: Mapping[str, Jagged] = field(default_factory=dict)
    candidates: Mapping[str, Nested] = field(default_factory=dict)
    dense: Mapping[str, Tensor] = field(default_factory=dict)  # each [samples, ...]
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # each [samples]
    keys: Tensor | None = None  # [samples] int64
    number: int = 0  # of the global batch, counted from the start of the run

    def __post_init__(self) -> None:
        sizes = {name: len(part) for name, part in self.parts().items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"features differ in their number of samples: {sizes}")

    def parts(self) -> Mapping[str, Jagged | Nested | Tensor]:
        """Every column under a unique name, in an order that all ranks share."""
        return self._parts

    @cached_property
    def _parts(self) -> dict[str, Jagged | Nested | Tensor]:  # asked for many times a step
        parts: dict[str, Jagged | Nested | Tensor] = {}
        for kind, columns in (
            ("s", self.sequences),
            ("c", self.candidates),
            ("d", self.dense),
            ("w", self.weights),
        ):
            parts |= {f"{kind}/{name}": columns[name] for name in sorted(columns)}
        if self.keys is not None:
            parts["k/"] = self.keys
        return parts

    def with_parts(self, parts: Mapping[str, Jagged | Nested | Tensor]) -> SequenceBatch:
        columns: dict[str, dict[str, Any]] = {"s": {}, "c": {}, "d": {}, "w": {}, "k": {}}
        for name, part in parts.items():
            columns[name[0]][name[2:]] = part
        return replace(
            self,
            sequences=columns["s"],
            candidates=columns["c"],
            dense=columns["d"],
            weights=columns["w"],
            keys=columns["k"].get(""),
        )

    def __len__(self) -> int:
        return next((len(part) for part in self.parts().values()), 0)

    @property
    def device(self) -> torch.device:
        for part in self.parts().values():
            return part.device if isinstance(part, Tensor) else part.values.device
        return torch.device("cpu")

    def check(self) -> SequenceBatch:
        for name, part in self.parts().items():
            if not isinstance(part, Tensor):
                part.check(name[2:])
        return self

    def values(self, name: str) -> Tensor:
        """All values of one feature, flat: what an embedding table reads."""
        for columns in (self.sequences, self.candidates):
            if name in columns:
                return columns[name].values
        if name in self.dense:
            return self.dense[name]
        known = sorted([*self.sequences, *self.candidates, *self.dense])
        raise ValueError(f"the batch has no feature {name!r}; it has {', '.join(known) or 'none'}")

    def __contains__(self, name: object) -> bool:
        """Whether there is a feature of this name."""
        return name in self.sequences or name in self.candidates or name in self.dense

    def select(self, index: Tensor) -> SequenceBatch:
        """The samples at `index` ([n] int64), in that order; repeats allowed."""
        parts = self.parts().items()
        return self.with_parts(
            {n: p[index] if isinstance(p, Tensor) else p.select(index) for n, p in parts}
        )

    def slice(self, start: int, stop: int) -> SequenceBatch:
        parts = self.parts().items()
        return self.with_parts(
            {n: p[start:stop] if isinstance(p, Tensor) else p.slice(start, stop) for n, p in parts}
        )

    def split(self, sizes: Sequence[int]) -> list[SequenceBatch]:
        if sum(sizes) != len(self):
            raise ValueError(
                f"split sizes {list(sizes)} add up to {sum(sizes)}, the batch has "
                f"{len(self)} samples"
            )
        edges = [0]
        for size in sizes:
            edges.append(edges[-1] + size)
        return [self.slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]

    @staticmethod
    def concat(batches: Sequence[SequenceBatch]) -> SequenceBatch:
        if not batches:
            raise ValueError("concat needs at least one batch")
        columns = [b.parts() for b in batches]
        if any(c.keys() != columns[0].keys() for c in columns):
            raise ValueError(
                f"batches differ in their features: {sorted({k[2:] for c in columns for k in c})}"
            )

        def join(name: str) -> Jagged | Nested | Tensor:
            parts = [c[name] for c in columns]
            if isinstance(parts[0], Tensor):
                return torch.cat(parts)  # type: ignore[arg-type]
            return type(parts[0]).concat(parts)  # type: ignore[arg-type]

        return batches[0].with_parts({name: join(name) for name in columns[0]})

    def map(self, function: Callable[[Tensor], Tensor]) -> SequenceBatch:
        parts = self.parts().items()
        return self.with_parts(
            {n: function(p) if isinstance(p, Tensor) else p.map(function) for n, p in parts}
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceBatch:
        """Its features remember what they were on the CPU: nobody has to read their sizes from the
        device."""
        return self.with_parts(
            {n: p.to(device, non_blocking=non_blocking) for n, p in self.parts().items()}
        )

    def pin_memory(self) -> SequenceBatch:
        return self.map(lambda t: t.pin_memory())

    def tensors(self) -> list[Tensor]:
        """Flat list of all tensors, sizes before what they size."""
        tensors: list[Tensor] = []
        for part in self.parts().values():
            if isinstance(part, Tensor):
                tensors.append(part)
            elif isinstance(part, Jagged):
                tensors += [part.lengths, part.values]
            else:
                tensors += [part.counts, part.lengths, part.values]
        return tensors

    def with_tensors(self, tensors: Sequence[Tensor]) -> SequenceBatch:
        """This batch's features with other values: the inverse of `tensors`."""
        queue = iter(tensors)
        parts: dict[str, Jagged | Nested | Tensor] = {}
        for name, part in self.parts().items():
            if isinstance(part, Tensor):
                parts[name] = next(queue)
            elif isinstance(part, Jagged):
                lengths = next(queue)
                parts[name] = Jagged(next(queue), lengths)
            else:
                counts, lengths = next(queue), next(queue)
                parts[name] = Nested(next(queue), lengths, counts)
        return self.with_parts(parts)


def check_is_batch(batch: object) -> SequenceBatch:
    """The batch itself.

    Raises:
        TypeError: it is something else.
        ValueError: its features are on different devices, or on the meta device.
    """
    if not isinstance(batch, SequenceBatch):
        raise TypeError(
            f"a batch is a freescale.SequenceBatch, not a {type(batch).__name__}: "
            "SequenceBatch(sequences={...}, dense={...}, weights={...})"
        )
    devices = {
        name[2:]: part.device if isinstance(part, Tensor) else part.values.device
        for name, part in batch.parts().items()
    }
    if len(set(devices.values())) > 1 or torch.device("meta") in devices.values():
        listed = ", ".join(f"{name or 'keys'} on {device}" for name, device in devices.items())
        raise ValueError(
            f"the batch is on several devices or on none ({listed}): put it on the CPU"
        )
    return batch
