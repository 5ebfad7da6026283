"""Batches of sequences: jagged features, two-level candidates, per-sample columns.

A sample is one user's history with everything that belongs to it. All operations (select, split,
concat) keep samples whole. They use index arithmetic, without a Python loop over samples, and run
on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from freescale.packed import Packed, find_bounds
from freescale.sequences import HostSizes, Jagged, Nested, Parts, compute_offsets, concat_ranges

__all__ = [
    "HostSizes",
    "Jagged",
    "Nested",
    "Parts",
    "SequenceBatch",
    "check_is_batch",
    "compute_offsets",
    "concat_ranges",
]


@dataclass(frozen=True)
class SequenceBatch:
    """A batch of samples, stored by feature. Every feature has the same number of samples.

    `weights` holds each sample's weight, per task: a task's summed loss is divided by the sum of
    its weights over all ranks. `keys` are random keys, a function of (seed, step, sample).
    Randomness of a sample (dropout, negatives) is drawn from its key, so results do not depend on
    the rank that computes it. `shared` belongs to the batch as a whole and is equal on all ranks,
    for example negatives that every sample uses. Moving samples does not change it.
    """

    sequences: Mapping[str, Jagged] = field(default_factory=dict)
    candidates: Mapping[str, Nested] = field(default_factory=dict)
    dense: Mapping[str, Tensor] = field(default_factory=dict)  # each [samples, ...]
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # each [samples]
    keys: Tensor | None = None  # [samples] int64
    number: int = 0  # of the global batch, counted from the start of the run
    shared: Mapping[str, Tensor] = field(default_factory=dict)  # each [any, ...]
    # the buffer that holds all tensors, if the batch is packed
    packing: Packed | None = field(default=None, repr=False, compare=False)
    # parts of divided histories, among the first samples; None: no history of the step is divided
    divided: Parts | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = {name: len(part) for name, part in self.parts().items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"features differ in their number of samples: {sizes}")
        for name, tensor in self.shared.items():
            if not tensor.ndim:
                raise ValueError(f"shared feature {name!r} is a single number: give it an axis")

    def parts(self) -> Mapping[str, Jagged | Nested | Tensor]:
        """Every column of the samples under a unique name, in an order that all ranks share."""
        return self._parts

    @cached_property
    def _parts(self) -> dict[str, Jagged | Nested | Tensor]:  # read many times a step
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
            packing=None,
        )

    def __len__(self) -> int:
        return next((len(part) for part in self.parts().values()), 0)

    @property
    def device(self) -> torch.device:
        for part in self.parts().values():
            return part.device if isinstance(part, Tensor) else part.values.device
        return next((tensor.device for tensor in self.shared.values()), torch.device("cpu"))

    def check(self) -> SequenceBatch:
        for name, part in self.parts().items():
            if not isinstance(part, Tensor):
                part.check(name[2:])
        return self

    def values(self, name: str) -> Tensor:
        """All values of a feature as a flat tensor, as an embedding table reads them."""
        for columns in (self.sequences, self.candidates):
            if name in columns:
                return columns[name].values
        for tensors in (self.dense, self.shared):
            if name in tensors:
                return tensors[name]
        known = sorted([*self.sequences, *self.candidates, *self.dense, *self.shared])
        raise ValueError(f"the batch has no feature {name!r}; it has {', '.join(known) or 'none'}")

    def __contains__(self, name: object) -> bool:
        """Whether there is a feature of this name."""
        return any(
            name in columns
            for columns in (self.sequences, self.candidates, self.dense, self.shared)
        )

    def select(self, index: Tensor) -> SequenceBatch:
        """The samples at `index` ([n] int64), in that order; repeats allowed."""
        return self._move(lambda tensor: tensor[index], lambda part: part.select(index))

    def slice(self, start: int, stop: int) -> SequenceBatch:
        return self._move(lambda tensor: tensor[start:stop], lambda part: part.slice(start, stop))

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
        """Concatenates batches, in order. Their shared features must be equal."""
        if not batches:
            raise ValueError("concat needs at least one batch")
        columns = [b.parts() for b in batches]
        if any(c.keys() != columns[0].keys() for c in columns):
            raise ValueError(
                f"batches differ in their features: {sorted({k[2:] for c in columns for k in c})}"
            )

        first = batches[0].shared
        for batch in batches[1:]:
            if batch.shared.keys() != first.keys() or any(
                batch.shared[name] is not first[name]
                and not torch.equal(batch.shared[name], first[name])
                for name in first
            ):
                raise ValueError(f"batches differ in their shared features: {sorted(first)}")

        def join(name: str) -> Jagged | Nested | Tensor:
            parts = [c[name] for c in columns]
            if isinstance(parts[0], Tensor):
                return torch.cat(parts)  # type: ignore[arg-type]
            return type(parts[0]).concat(parts)  # type: ignore[arg-type]

        return batches[0].with_parts({name: join(name) for name in columns[0]})

    def map(self, function: Callable[[Tensor], Tensor]) -> SequenceBatch:
        return self.with_tensors([function(tensor) for tensor in self.tensors()])

    def _move(
        self,
        tensor: Callable[[Tensor], Tensor],
        part: Callable[[Jagged | Nested], Jagged | Nested],
    ) -> SequenceBatch:
        parts = self.parts().items()
        moved = self.with_parts(
            {n: tensor(p) if isinstance(p, Tensor) else part(p) for n, p in parts}
        )
        return moved if self.divided is None else replace(moved, divided=None)

    def list_shared(self) -> list[Tensor]:
        """The tensors of `shared`, in an order that all ranks share."""
        return [self.shared[name] for name in sorted(self.shared)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequenceBatch:
        """Copies the batch to `device`; lengths stay known on the host. A packed batch needs only
        one copy."""
        device = torch.device(device)
        if self.packing is not None and device.type != "cpu":
            return self.with_packing(self.packing.to(device, non_blocking), moved=True)
        moved = [tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors()]
        return self._refill(moved, lambda part, queue: part.copy(queue, moved=True))

    @property
    def packed(self) -> Tensor | None:
        """The buffer ([bytes] uint8) that all tensors are views of; None if not packed."""
        return None if self.packing is None else self.packing.buffer

    def find_bounds(self, values: Tensor) -> tuple[int, int]:
        """(minimum, maximum) of integers on the host. Packing may have stored them already."""
        packing = self.packing
        if packing is not None and packing.bounds is not None:
            for tensor, known in zip(self.tensors(), packing.bounds, strict=True):
                if tensor is values and known is not None:
                    return known
        (found,) = find_bounds([values])
        assert found is not None
        return found

    def pack(self, pin: bool = False) -> SequenceBatch:
        """Packs all tensors into one buffer on the host."""
        if self.packing is not None and (not pin or self.packing.buffer.is_pinned()):
            return self
        return self.with_packing(Packed.of(self.tensors(), pin))

    def pin_memory(self) -> SequenceBatch:
        """Packs the batch in pinned memory."""
        return self.pack(pin=True)

    def tensors(self) -> list[Tensor]:
        """All tensors as a flat list: counts and lengths before values, shared tensors last."""
        tensors: list[Tensor] = []
        for part in self.parts().values():
            tensors += [part] if isinstance(part, Tensor) else part.tensors()
        return tensors + self.list_shared()

    def with_tensors(self, tensors: Sequence[Tensor]) -> SequenceBatch:
        """The same features with other tensors: the inverse of `tensors`."""
        return self._refill(tensors, lambda part, queue: part.refill(queue))

    def with_packing(self, packing: Packed, moved: bool = False) -> SequenceBatch:
        """The same features as views of a buffer. `moved`: the buffer is on another device, so
        lengths that were on the CPU are kept as host sizes."""
        return self._refill(packing.tensors(), lambda part, queue: part.copy(queue, moved), packing)

    def _refill(
        self,
        tensors: Iterable[Tensor],
        refill: Callable[[Jagged | Nested, Iterator[Tensor]], Jagged | Nested],
        packing: Packed | None = None,
    ) -> SequenceBatch:
        queue = iter(tensors)
        batch = self.with_parts(
            {
                name: next(queue) if isinstance(part, Tensor) else refill(part, queue)
                for name, part in self.parts().items()
            }
        )
        shared = dict(zip(sorted(self.shared), queue, strict=True))
        return replace(batch, shared=shared, packing=packing) if shared or packing else batch


def check_is_batch(batch: object) -> SequenceBatch:
    """Returns `batch` if it is a usable SequenceBatch.

    Raises:
        TypeError: if it is not a SequenceBatch.
        ValueError: if its features are on different devices, or on the meta device.
    """
    if not isinstance(batch, SequenceBatch):
        raise TypeError(
            f"a batch is a freescale.SequenceBatch, not a {type(batch).__name__}: "
            "SequenceBatch(sequences={...}, dense={...}, weights={...})"
        )
    devices = {
        name[2:]: part.device if isinstance(part, Tensor) else part.values.device
        for name, part in batch.parts().items()
    } | {name: tensor.device for name, tensor in batch.shared.items()}
    if len(set(devices.values())) > 1 or torch.device("meta") in devices.values():
        listed = ", ".join(f"{name or 'keys'} on {device}" for name, device in devices.items())
        raise ValueError(
            f"the batch is on several devices or on meta ({listed}): put it on the CPU"
        )
    return batch
