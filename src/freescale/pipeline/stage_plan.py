"""Where and when the stages of the staged schedule run (see staged.py). A pure function: the same
plan on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from freescale.embedding.collision import is_few


class Stage(Enum):
    """What happens to rows in lane `ahead` besides the traffic of rows itself."""

    REQUEST = 1  # the owners learn which rows the following batch reads
    COMPARE = 2  # the owners compare the current batch with it
    RESOLVE = 3  # the owners make its rows resident


@dataclass(frozen=True)
class StagePlan:
    """The stages of lane `ahead` that touch no row, around the deferred gradients."""

    device: torch.device
    nearby: bool
    request_lane: str  # `ahead`, or `input`, which requests rows a step earlier
    before: tuple[Stage, ...]  # the deferred gradients set off
    meanwhile: tuple[Stage, ...]  # the first of them are on their way
    resolve_in_compare: bool  # rows become resident while the device compares
    prepare_at_once: bool  # lane `input` plans from the forward on, not from its end

    def divides(self, current: int, following: int) -> bool:
        """Whether two consecutive batches are divided by the rows that they share. The arguments
        are the bytes that a rank reads for each. Dividing a few rows on a CPU would cost more time
        than it hides."""
        few = (is_few(size, self.device, self.nearby) for size in (current, following))
        return not all(few)


def plan_stages(device: torch.device, nearby: bool) -> StagePlan:
    """Plans a step.

    Args:
        device: of the ranks.
        nearby: whether all ranks are on one machine.

    On CPUs, owners compare before the deferred gradients set off: the urgent ones depend on the
    result, and the messages would queue behind the bulk on a slow link. On GPUs, where computing
    takes longer than messages, they compare meanwhile.

    On GPUs, and between machines, lane `input` requests rows, a step earlier. Between machines a
    message takes as long as many rows, and the link would be idle while a step begins with two of
    them. On a GPU the host waits for the device to count the ids for each owner, which would stall
    lane `ahead`. Lane `ahead` requests the first batches in any case: tables are placed when the
    first one is here.

    Lane `input` plans and packs in Python. On a GPU it does so after the forward, whose launches
    need the interpreter more than the backward's; on a CPU it has the whole step.
    """
    on_host = device.type == "cpu"
    search = (Stage.REQUEST, Stage.COMPARE)
    return StagePlan(
        device=device,
        nearby=nearby,
        request_lane="ahead" if on_host and nearby else "input",
        before=search if on_host else (),
        meanwhile=(Stage.RESOLVE,) if on_host else search,
        resolve_in_compare=not on_host,
        prepare_at_once=on_host,
    )
