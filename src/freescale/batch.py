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


def compute_offsets(lengths: Tensor) -> Tensor:
    """[n] lengths -> [n + 1] offsets."""
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def concat_ranges(starts: Tensor, lengths: Tensor, total: int | None = None) -> Tensor:
    """Concatenated index ranges [starts[i], starts[i] + lengths[i]) -> [sum(lengths)]. Reads the
    device for their sum if no `total` is given."""
    offsets = compute_offsets(lengths)
    total = int(offsets[-1]) if total is None else total
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return torch.arange(total, device=lengths.device) + shift


@dataclass(frozen=True)
class HostSizes:
    """What the host knows of tokens that lie on a device, so that nobody has to read it there.
    Tensors are on the CPU."""

    lengths: Tensor  # [samples] int64, candidates included
    candidate_counts: Tensor | None = None  # [samples] int64
    time_span: int | None = None  # the longest between two timestamps of a sample; None: not known


@dataclass(frozen=True)
class Jagged:
    """One feature with a variable number of values per sample."""

    values: Tensor  # [tokens, ...]
    lengths: Tensor  # [samples] int64
    # the same on the CPU, where it moved from
    host: Jagged | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.lengths.dtype != torch.int64 or self.lengths.ndim != 1:
            raise ValueError(
                f"lengths must be a 1-d int64 tensor, not {self.lengths.dtype} with "
                f"{self.lengths.ndim} axes"
            )

    @cached_property
    def offsets(self) -> Tensor:  # [samples + 1]
        return compute_offsets(self.lengths)

    @cached_property
    def host_lengths(self) -> Tensor:  # [samples], on the CPU
        """What they were before they moved; read from the device if that is not known."""
        return self.lengths.cpu() if self.host is None else self.host.lengths

    def __len__(self) -> int:
        return self.lengths.numel()

    def check(self, name: str) -> None:
        """Refuses lengths that do not fit the values. Reads the device if the host does not know
        them."""
        if bool((self.host_lengths < 0).any()):
            raise ValueError(
                f"feature {name!r}: a negative length ({int(self.host_lengths.min())})"
            )
        if int(self.host_lengths.sum()) != self.values.shape[0]:
            raise ValueError(
                f"feature {name!r}: lengths add up to {int(self.host_lengths.sum())}, but there "
                f"are {self.values.shape[0]} values"
            )

    def select(self, index: Tensor) -> Jagged:
        lengths = self.lengths[index]
        return Jagged(self.values[concat_ranges(self.offsets[:-1][index], lengths)], lengths)

    def slice(self, start: int, stop: int) -> Jagged:
        """Samples [start, stop) as views: no copy of the values."""
        first, last = (int(self.host_lengths[:edge].sum()) for edge in (start, stop))
        host = None if self.host is None else self.host.slice(start, stop)
        return Jagged(self.values[first:last], self.lengths[start:stop], host)

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        return Jagged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def map(self, function: Callable[[Tensor], Tensor]) -> Jagged:
        return Jagged(function(self.values), function(self.lengths))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Jagged:
        values, lengths = (
            tensor.to(device, non_blocking=non_blocking) for tensor in (self.values, self.lengths)
        )
        return Jagged(values, lengths, self if self.lengths.device.type == "cpu" else self.host)


@dataclass(frozen=True)
class Nested:
    """Two-level jagged: each sample has candidates, each candidate has values."""

    values: Tensor  # [tokens, ...]
    lengths: Tensor  # [candidates] int64: values per candidate
    counts: Tensor  # [samples] int64: candidates per sample
    # the same on the CPU, where it moved from
    host: Nested | None = field(default=None, repr=False, compare=False)

    @cached_property
    def inner(self) -> Jagged:
        return Jagged(self.values, self.lengths, None if self.host is None else self.host.inner)

    @cached_property
    def outer(self) -> Jagged:
        return Jagged(self.lengths, self.counts, None if self.host is None else self.host.outer)

    def __len__(self) -> int:
        return self.counts.numel()

    def check(self, name: str) -> None:
        self.outer.check(f"{name} (candidates per sample)")
        self.inner.check(f"{name} (values per candidate)")

    def select(self, index: Tensor) -> Nested:
        counts = self.counts[index]
        inner = self.inner.select(concat_ranges(self.outer.offsets[:-1][index], counts))
        return Nested(inner.values, inner.lengths, counts)

    def slice(self, start: int, stop: int) -> Nested:
        first, last = (int(self.outer.host_lengths[:edge].sum()) for edge in (start, stop))
        inner = self.inner.slice(first, last)
        host = None if self.host is None else self.host.slice(start, stop)
        return Nested(inner.values, inner.lengths, self.counts[start:stop], host)

    @staticmethod
    def concat(parts: Sequence[Nested]) -> Nested:
        inner = Jagged.concat([p.inner for p in parts])
        return Nested(inner.values, inner.lengths, torch.cat([p.counts for p in parts]))

    def map(self, function: Callable[[Tensor], Tensor]) -> Nested:
        return Nested(function(self.values), function(self.lengths), function(self.counts))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Nested:
        values, lengths, counts = (
            t.to(device, non_blocking=non_blocking)
            for t in (self.values, self.lengths, self.counts)
        )
        return Nested(
            values, lengths, counts, self if self.counts.device.type == "cpu" else self.host
        )


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
