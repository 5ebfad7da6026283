"""TorchRec's collectives and waits in FreeScale's ledger: the stamps that our own collectives have.

TorchRec starts its AllToAlls through `torch.distributed.all_to_all_single` and waits for what that
returns. During a step both are wrapped: issued when it starts one, waited when it first waits for
it, done when that wait returns. Integers are ids; floats are rows when an autograd function's
forward sends them and gradients when its backward does. DistributedDataParallel sums the dense
gradients of a bucket when the backward has made them, and waits for the sums when the backward is
over: through a hook that it has for this, the same sum is started and both are stamped. On GPUs,
where these stamps say nothing, TorchRec is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torchrec_arms import Arm

from freescale.ledger.ledger import Collective, Ledger

_COLLECTIVES = ("reduce_scatter_tensor", "reduce_scatter", "all_gather_into_tensor", "all_gather")


class _Waited(dist.Work):
    """A collective under way, as TorchRec sees it. (It waits only for what is a `dist.Work`, in
    places.)"""

    def __init__(self, work: dist.Work, collective: Collective) -> None:
        super().__init__()
        self._work, self._collective = work, collective

    def wait(self, *arguments: Any) -> Any:
        if self._collective.waited is not None:  # once more, to be sure
            return self._work.wait(*arguments)
        with self._collective.wait():
            return self._work.wait(*arguments)


@contextmanager
def recorded(ledger: Ledger, rank: int) -> Iterator[None]:
    """Until it is left, every exchange of ids, rows and gradients by this process goes through the
    ledger: AllToAlls, and for pooled row-wise tables ReduceScatters of sums and AllGathers of their
    gradients."""
    plain = {name: getattr(dist, name) for name in ("all_to_all_single", *_COLLECTIVES)}

    def all_to_all_single(
        output: Tensor,
        input: Tensor,  # noqa: A002 - torch's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        kind = _find_kind(input, sys._getframe(1))
        sent, received = (
            _remote(input, input_split_sizes, rank),
            _remote(output, output_split_sizes, rank),
        )
        collective = ledger.begin_collective(kind, sent, received, "torchrec")
        started = plain["all_to_all_single"](
            output, input, output_split_sizes, input_split_sizes, group, async_op=True
        )
        work = _Waited(started, collective)
        return work if async_op else work.wait()

    def record(name: str) -> Any:
        def call(output: Any, input: Any, *more: Any, async_op: bool = False, **named: Any) -> Any:  # noqa: A002
            moved = max(_count_bytes(output), _count_bytes(input))  # what all ranks have together
            away = moved - moved // dist.get_world_size()
            first = input[0] if isinstance(input, list) else input
            kind = _find_kind(first, sys._getframe(1))
            collective = ledger.begin_collective(kind, away, away, "torchrec")
            work = _Waited(plain[name](output, input, *more, async_op=True, **named), collective)
            return work if async_op else work.wait()

        return call

    dist.all_to_all_single = all_to_all_single
    for name in _COLLECTIVES:
        setattr(dist, name, record(name))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


def _find_kind(tensor: Tensor, caller: FrameType) -> str:
    backward = caller.f_code.co_name in ("backward", "_grad_dist")  # the second: PEC
    return ("gradients" if backward else "rows") if tensor.is_floating_point() else "ids"


def _count_bytes(tensors: Tensor | list[Tensor]) -> int:
    each = tensors if isinstance(tensors, list) else [tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in each)


def _remote(tensor: Tensor, splits: list[int] | None, rank: int) -> int:
    """Bytes that go to or come from other ranks."""
    share = splits[rank] / max(1, sum(splits)) if splits is not None else 1 / dist.get_world_size()
    return round(tensor.numel() * tensor.element_size() * (1 - share))


def summed(ledger: Ledger, bucket: dist.GradBucket) -> Future[Tensor]:
    """A hook of DistributedDataParallel: what it does without one, the mean over the ranks."""
    flat, world = bucket.buffer(), dist.get_world_size()
    moved = 2 * flat.numel() * flat.element_size() * (world - 1) // world  # as of a ring
    collective = ledger.begin_collective("dense", moved, moved, "torchrec")

    def waits() -> None:
        collective.waited = ledger.clock.stamp()
        if collective.done is not None:  # before anybody waited
            collective.done = collective.waited
        ledger.record(collective)

    def came(sums: Future[list[Tensor]]) -> Tensor:
        collective.done = ledger.clock.stamp()
        return sums.value()[0]

    # Before DistributedDataParallel's own, which waits: it is queued once this hook has returned.
    torch.autograd.Variable._execution_engine.queue_callback(waits)
    return dist.all_reduce(flat.div_(world), async_op=True).get_future().then(came)


class Ledgered:
    """A TorchRec arm with a ledger."""

    def __init__(self, arm: Arm, rank: int) -> None:
        self.arm, self.ledger, self._rank, self._steps = arm, Ledger("cpu"), rank, 0
        if arm.device.type == "cpu":
            # it may not be annotated
            arm.replicated.register_comm_hook(
                self.ledger, lambda ledger, bucket: summed(ledger, bucket)
            )

    def step(self) -> float:
        """Trains on the next batch. The loss is reduced after the step's time: TorchRec's pipeline
        itself does not reduce it."""
        loss = self.begin_step()
        dist.all_reduce(loss)
        return float(loss)

    def begin_step(self) -> Tensor:
        """This rank's share of the loss, not read. On a GPU the ledger sees nothing of it."""
        if self.arm.device.type != "cpu":
            return self.arm.progress()
        with recorded(self.ledger, self._rank):
            self.ledger.begin_step(self._steps)
            loss = self.arm.progress()
            self.ledger.end_step()
        self._steps += 1
        return loss

    def quiet(self) -> None:
        self.arm.close()
