"""What a run decides by itself, where its options say `auto`: the precision, from the device, and
the sum of dense gradients, from a measurement. Chosen once, and kept in checkpoints: a run that
resumes repeats what was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from freescale.pipeline.dense.buckets import GradientBuckets
from freescale.pipeline.dense.choice import DenseSums, choose_dense_sums, measure_dense_sums
from freescale.pipeline.dense.partitioned import PartitionedAllReduce
from freescale.pipeline.dense.reducer import Reducer
from freescale.pipeline.precision import choose_precision, supports_bf16
from freescale.transport.api import Transport

_REPEATED = "as in the checkpoint"


class Choices:
    """Of one schedule. `tune` completes them."""

    def __init__(
        self,
        transport: Transport,
        parameters: Iterable[nn.Parameter],
        reducer: Reducer,
        precision: str,
        dense_sums: str,
    ) -> None:
        """`parameters` are the dense ones, `reducer` sums their gradients. A collective, where
        partitioned sums are requested."""
        self._transport, self._reducer = transport, reducer
        device = transport.device
        float32 = all(parameter.dtype == torch.float32 for parameter in parameters)
        self._automatic_precision = precision == "auto"
        self.precision, self._reason = choose_precision(
            precision, device.type, supports_bf16(device), float32
        )
        self.dense_sums: DenseSums | None = None  # not known yet
        self.partitioned: PartitionedAllReduce | None = None  # where it sums
        if dense_sums != "auto":
            self._adopt(DenseSums(dense_sums, "as requested"))

    def tune(self) -> None:
        """Measures what is not known yet. A collective. With one rank there is nothing to sum."""
        transport, reducer = self._transport, self._reducer
        if self.dense_sums is not None or transport.world == 1:
            return
        if not isinstance(reducer, GradientBuckets):
            self.dense_sums = DenseSums("collective", "compressed gradients have their own sums")
        elif not transport.sums_apart or not reducer.flat:
            self.dense_sums = DenseSums("collective", "exchanges go through the process group, too")
        else:
            opened = self._open_partitioned()
            seconds = measure_dense_sums(transport, opened, reducer.flat)
            opened.rest()  # training may begin later
            self._adopt(choose_dense_sums(seconds), opened)

    def _adopt(self, chosen: DenseSums, opened: PartitionedAllReduce | None = None) -> None:
        self.dense_sums = chosen
        if chosen.kind == "partitioned" and self._transport.world > 1:
            assert isinstance(self._reducer, GradientBuckets)
            self.partitioned = opened or self._open_partitioned()
            self._reducer.summing = self.partitioned
        elif opened is not None:
            opened.close()

    def _open_partitioned(self) -> PartitionedAllReduce:
        """A collective. On a CPU, one bucket leaves when nothing is left to compute: no lane."""
        several = len(self._reducer.flat) > 1
        return PartitionedAllReduce(
            self._transport, lane=several or self._transport.device.type != "cpu"
        )

    def describe(self) -> list[str]:
        """A line for each, with its reason."""
        lines = [f"precision {self.precision} ({self._reason})"]
        if self.dense_sums is not None and self._transport.world > 1:
            kind, reason = self.dense_sums.kind, self.dense_sums.reason
            lines.append(f"dense sums {kind} ({reason})")
        return lines

    def state_dict(self) -> dict[str, str]:
        sums = {} if self.dense_sums is None else {"dense_sums": self.dense_sums.kind}
        return {"precision": self.precision, **sums}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Repeats those of an earlier run, where this one has `auto`. A collective."""
        if self._automatic_precision and "precision" in state:
            requested = state["precision"]
            device = self._transport.device
            self.precision, _ = choose_precision(requested, device.type, supports_bf16(device))
            self._reason = _REPEATED
        # one rank sums nothing, and passes on what several may need again
        exact = self._transport.world == 1 or isinstance(self._reducer, GradientBuckets)
        if self.dense_sums is None and exact and "dense_sums" in state:
            self._adopt(DenseSums(state["dense_sums"], _REPEATED))

    def rest(self) -> None:
        """Between runs: no thread is left."""
        if self.partitioned is not None:
            self.partitioned.rest()

    def close(self) -> None:
        """Gives channels back. A collective."""
        if self.partitioned is not None:
            self.partitioned.close()
