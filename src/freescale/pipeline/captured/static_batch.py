"""A batch of fixed size at a fixed address: what a CUDA graph reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from freescale.batch import Jagged, SequenceBatch
from freescale.kernels.attention.static_plan import StaticPlans
from freescale.pipeline.captured.sizes import StaticSize, pad_lengths

WEIGHTS = "target_weights"  # of the tokens: those of filling samples are 0


def can_pad(batch: SequenceBatch) -> bool:
    """Whether all features of a batch are of samples or of the events of their histories, so that
    filling samples can be added."""
    parts = list(batch.sequences.values())
    if not parts or batch.candidates or any(part.host is None for part in parts):
        return False
    first = parts[0].host_lengths
    return all(
        part.host_lengths is first or torch.equal(part.host_lengths, first) for part in parts
    )


class StaticBatch:
    """The batch that a model sees in place of batches of one size.

    Filling samples have values of -1, which as ids name no row, and a weight of 0.
    """

    def __init__(
        self, size: StaticSize, like: SequenceBatch, longest: int, span: int | None = None
    ) -> None:
        """
        Args:
            like: a batch of this size, which has the same features as all others.
            longest: tokens that a sample may have.
            span: most that two timestamps of a sample may differ by.
        """
        self.size, device = size, like.device
        self._lengths = torch.zeros(size.samples, dtype=torch.int64, device=device)
        self._numbers = torch.arange(size.tokens, device=device)
        self._staging = torch.zeros(size.samples + 1, dtype=torch.int64)
        self._staged = torch.zeros(size.samples + 1, dtype=torch.int64, device=device)
        self._free: torch.cuda.Event | None = None  # of the last copy out of `_staging`
        if device.type == "cuda":
            self._staging = self._staging.pin_memory()
            self._free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.host_lengths = torch.zeros(size.samples, dtype=torch.int64)
        self._plans = StaticPlans(max(longest, size.filler))
        # one object, which `fill` changes: the model reads the sizes from it
        self._host = Jagged(
            torch.zeros(size.tokens, dtype=torch.int8), self.host_lengths, plans=self._plans
        )

        def widen(values: Tensor, count: int) -> Tensor:
            # ids of -1 name no row
            shape = count, *values.shape[1:]
            return torch.full(shape, -1, dtype=values.dtype, device=device)

        sequences = {
            name: Jagged(widen(part.values, size.tokens), self._lengths, self._host)
            for name, part in like.sequences.items()
        }
        if "timestamps" in sequences:
            host = replace(self._host, span=span)
            sequences["timestamps"] = replace(sequences["timestamps"], host=host)
        if WEIGHTS not in sequences:
            weights = torch.zeros(size.tokens, device=device)
            sequences[WEIGHTS] = Jagged(weights, self._lengths, self._host)
        self.batch = replace(
            like,
            sequences=sequences,
            dense={name: widen(part, size.samples) for name, part in like.dense.items()},
            weights={},
            shared={name: part.clone() for name, part in like.shared.items()},
            keys=None if like.keys is None else widen(like.keys, size.samples),
        )

    def fill(self, batch: SequenceBatch) -> None:
        """Copies a batch into it, on the current stream. The host does not wait."""
        size = self.size
        host = next(iter(batch.sequences.values())).host_lengths
        tokens = int(host.sum())
        padded = torch.from_numpy(pad_lengths(host.numpy().astype(np.int64), size))
        self.host_lengths.copy_(padded)
        if self._free is not None:
            self._free.synchronize()  # of the copy before: long over
        self._staging[:-1] = padded
        self._staging[-1] = tokens
        self._staged.copy_(self._staging, non_blocking=True)
        if self._free is not None:
            self._free.record()
        self._lengths.copy_(self._staged[:-1])
        copies: list[tuple[Tensor, Tensor]] = []  # into, source
        own = self.batch.sequences
        for name, part in batch.sequences.items():
            own[name].values[tokens:].fill_(-1)
            copies.append((own[name].values[:tokens], part.values))
        copies += [(self.batch.dense[n][: size.real], part) for n, part in batch.dense.items()]
        copies += [(self.batch.shared[n], part) for n, part in batch.shared.items()]
        if batch.keys is not None and self.batch.keys is not None:
            copies.append((self.batch.keys[: size.real], batch.keys))
        into, source = zip(*copies, strict=True)
        torch._foreach_copy_(into, source)
        self._plans.refill(padded.numpy())
        real = self._numbers < self._staged[-1]
        weights = own[WEIGHTS].values
        if WEIGHTS in batch.sequences:
            weights.mul_(real)
        else:
            weights.copy_(real)
