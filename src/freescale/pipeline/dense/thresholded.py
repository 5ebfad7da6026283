"""Dense gradients with error feedback: large entries are summed over the ranks now, the others wait
on their rank until they are large.

    gradient += error
    every so many steps: threshold = what a share of 1 - eta of the entries reaches, per tensor
    send and sum the entries that reach it, at most that share of them, the largest first
    error = the others

It takes the place of buckets.py in the exact step and has the same methods. Small tensors are
summed whole, out of the same share where they take little of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from freescale.compress.entries import sum_entries
from freescale.compress.threshold import (
    SMALL,
    check_period,
    check_share,
    compute_remaining_budget,
    compute_threshold,
    distribute_budget,
    get_smallest_threshold,
    select_largest,
)
from freescale.config import TrainConfig
from freescale.pipeline.dense.reducer import Carried, Reducer, make_flat, make_views
from freescale.transport.api import Handle, Transport


@dataclass(frozen=True)
class Thresholding:
    """The option `reducer` of a schedule: a share `eta` of the entries is held back; thresholds are
    reset every `every` steps."""

    eta: float
    every: int = TrainConfig.compress_every

    def __post_init__(self) -> None:
        check_share(self.eta)
        check_period(self.every)

    def __call__(
        self, parameters: Iterable[nn.Parameter], device: torch.device
    ) -> ThresholdedGradients:
        return ThresholdedGradients(parameters, device, self.eta, self.every)


class ThresholdedGradients(Reducer):
    """In flat buffers as in the exact step.

    `state` holds what is carried from step to step, by parameter like an optimizer's: each rank has
    its own. After `reduce` the gradients are the same bits on every rank, so that weights never
    diverge. `clip` scales them, and not the errors, which have not been applied.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        eta: float,
        every: int = TrainConfig.compress_every,
    ) -> None:
        self.every = every
        self.parameters = [p for p in parameters if p.requires_grad]
        self._state: Carried = {}
        views: dict[nn.Parameter, Tensor] = {}
        self._small: list[Tensor] = []
        self._large: list[_Large] = []
        sizes = [p.numel() for p in self.parameters]
        thresholded = [p for p in self.parameters if p.numel() >= SMALL]
        remaining = compute_remaining_budget(sizes, eta)
        allowed = distribute_budget([p.numel() for p in thresholded], remaining)
        most = dict(zip(thresholded, allowed, strict=True))
        for dtype in dict.fromkeys(p.dtype for p in self.parameters):
            members = [p for p in self.parameters if p.dtype == dtype]
            if small := [p for p in members if p not in most]:
                self._small.append(make_flat(small, device))
                views |= make_views(small, self._small[-1])
            if large := {p: most[p] for p in members if p in most}:
                self._large.append(_Large(large, device, every))
                views |= make_views(list(large), self._large[-1].gradient)
                self._state |= self._large[-1].state
        self._views = [views[p] for p in self.parameters]
        self.flat = [*self._small, *(group.gradient for group in self._large)]
        self._transport: Transport | None = None
        self._handles: list[Handle] = []  # of the losses and the small tensors

    def start(self, transport: Transport, losses: Tensor, longest: int | None = None) -> None:
        """What is sent of a tensor depends on all of its gradient: only the losses [tasks] leave
        now."""
        self._transport, self._handles = transport, [transport.all_reduce(losses, "dense")]

    def send(self) -> None:
        """The small tensors."""
        assert self._transport is not None, "`start` comes first"
        self._handles += [self._transport.all_reduce(flat, "dense") for flat in self._small]

    def reduce(self) -> Tensor:
        """Gradients become the sum of what the ranks send; returns the losses, summed over the
        ranks."""
        self._check_attached()
        assert self._transport is not None and len(self._handles) == 1 + len(self._small), (
            "`start` and `send` come first"
        )
        for group in self._large:
            group.reduce(self._transport)
        losses, *small = self._handles
        for handle in small:
            handle.wait()
        self._transport, self._handles = None, []
        return losses.wait()

    @property
    def state(self) -> Carried:
        return self._state

    def adopt(self, saved: Sequence[Carried], same_ranks: bool) -> None:
        """The state of ranks that were, as their own or added up: no error is lost when their
        number changes. What a rank's gradients amount to changes with it, so that the thresholds
        are then found anew."""
        for parameter, entries in self.state.items():
            found = [of_rank[parameter] for of_rank in saved if parameter in of_rank]
            entries["error"].zero_()
            for of_rank in found:
                entries["error"] += of_rank["error"]
            if found and same_ranks:
                entries["threshold"].copy_(found[0]["threshold"])
                entries["age"].copy_(found[0]["age"])
            else:
                entries["age"].fill_(self.every)


class _Large:
    """The tensors of one dtype that are thresholded, in one flat vector."""

    def __init__(self, most: dict[nn.Parameter, int], device: torch.device, every: int) -> None:
        """`most`: how many entries of each tensor a step may send."""
        parameters, self.most, self.every = list(most), list(most.values()), every
        self.gradient, self.error = make_flat(parameters, device), make_flat(parameters, device)
        self.sizes = [p.numel() for p in parameters]
        self.thresholds = self.gradient.new_zeros(len(parameters))
        # steps since a threshold was set; on the host, which decides by it
        self.ages = torch.full((len(parameters),), every)
        errors = make_views(parameters, self.error)
        self.state = {
            p: {
                "error": errors[p],
                "threshold": self.thresholds[place : place + 1],
                "age": self.ages[place : place + 1],
            }
            for place, p in enumerate(parameters)
        }

    def reduce(self, transport: Transport) -> None:
        """On the main thread and the current stream, like all of the dense part."""
        with transport.ledger.span("threshold"):
            positions, values = self._select()
        moved = sum_entries(self.gradient, positions, values, transport, "dense")
        ledger = transport.ledger
        ledger.count("dense_entries", self.gradient.numel())
        ledger.count("dense_entries_sent", positions.numel())
        ledger.count("dense_entries_on_wire", moved.left)
        ledger.count("dense_entries_returned", moved.returned)

    def _select(self) -> tuple[Tensor, Tensor]:
        """What this rank sends, taken out of the sum of gradient and error; the rest is the error,
        the gradient is cleared."""
        self.gradient += self.error
        self._reset_thresholds()
        found, begin = [], 0
        for place, piece in enumerate(torch.split(self.gradient, self.sizes)):
            selected = select_largest(piece.abs(), self.thresholds[place], self.most[place])
            found.append(selected + begin)
            begin += self.sizes[place]
        positions = torch.cat(found)
        values = self.gradient[positions]
        self.error.copy_(self.gradient)
        self.error[positions] = 0
        self.gradient.zero_()
        return positions, values

    def _reset_thresholds(self) -> None:
        """Of the tensors whose time has come. A rank that had no sample found none: its time comes
        with its next step."""
        due = (self.ages >= self.every).tolist()
        self.ages += 1
        if not any(due):
            return
        pieces = torch.split(self.gradient, self.sizes)
        for place in (place for place, now in enumerate(due) if now):
            self.thresholds[place] = compute_threshold(pieces[place].abs(), self.most[place])[0]
        least = get_smallest_threshold(self.thresholds.dtype)
        set_now = (self.thresholds > least).cpu() & torch.tensor(due)
        self.ages[set_now] = 1
