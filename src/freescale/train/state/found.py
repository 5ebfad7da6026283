"""The snapshots of a run in memory, as the ranks of a new attempt find them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.dense.reducer import Reducer
from freescale.train.state.chain import Choice, Damaged, Link, choose_snapshots, explain_none
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.held import check_link, open_link
from freescale.train.state.holder_link import HolderLink
from freescale.train.state.memory import Segment
from freescale.train.state.model import refuse_other_model
from freescale.train.state.restore import load_snapshot
from freescale.train.state.transfers import FileReads, exchange_files
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import run_on_all_ranks


@dataclass
class FoundSnapshots:
    """Snapshots on all machines. Making one, `load_newest` and `load` are collectives."""

    run: str
    transport: Transport
    link: HolderLink | None  # to this machine's holder, if there is one
    machines: list[bytes]
    refused: list[int] = field(default_factory=list)  # steps that turned out to be damaged

    def __post_init__(self) -> None:
        names = self.link.list() if self.link is not None else []
        self.held: list[list[str]] = gather_json(self.transport, names)

    def choose(self) -> Choice | None:
        """The newest step that is complete for all ranks and not refused. The same on all."""
        return choose_snapshots(self.held, self.machines, self.refused)

    def explain_none(self) -> str:
        return explain_none(self.held)

    def describe(self, choice: Choice) -> str:
        """Where the state comes from."""
        far = [rank for rank, reader in enumerate(choice.readers) if reader != rank]
        if not far:
            return "from memory"
        ranks = f"rank{'s' * (len(far) > 1)} {', '.join(map(str, far))}"
        return f"from memory ({ranks} from the copy on another machine)"

    def load_newest(
        self,
        checkpoints: Checkpoints,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer | None,
    ) -> tuple[Choice, dict[str, Any]] | None:
        """Restores the newest state of the run if that is in memory; a snapshot that is damaged is
        passed over with a warning. Returns it and its JSON; None if there is no snapshot, or an
        intact checkpoint is newer."""
        while (choice := self.choose()) is not None:
            if checkpoints.last_step() > choice.step and _is_newer(checkpoints, choice.step):
                return None
            try:
                return choice, self.load(choice, model, optimizer, reducer)
            except Damaged as error:
                if self.transport.rank == 0:
                    warnings.warn(f"{error}. Taking one before", stacklevel=2)
                self.refused.append(choice.step)
        return None

    def load(
        self,
        choice: Choice,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer | None,
    ) -> dict[str, Any]:
        """Restores this rank, and returns the JSON of its snapshot.

        Raises:
            Damaged: on all ranks; names what is half written, damaged, another run's or another
                model's. Nothing is restored then.
        """
        chain, transport = choice.chains[self.transport.rank], self.transport
        with ExitStack() as stack:
            segments = self._fetch(choice)
            for segment in segments:
                stack.enter_context(closing(segment))
            reads = stack.enter_context(closing(FileReads()))
            state: dict[str, Any] = run_on_all_ranks(
                transport, lambda: self._check(chain, segments), Damaged
            )
            if not model.tables.placed:
                model.tables.place(recorded=state["placement"])

            def verify() -> list[dict[str, Tensor]]:
                _refuse_other(chain[-1], state, model, optimizer)
                return [
                    segment.verify(str(link), reads.threads)
                    for link, segment in zip(chain, segments, strict=True)
                ]

            tensors = run_on_all_ranks(transport, verify, Damaged)

            def copy_whole(name: str, to: Tensor) -> None:
                segments[0].copy(name, to, reads)

            load_snapshot(state, tensors, model, optimizer, reducer, copy_whole)
            return state

    def _check(self, chain: Sequence[Link], segments: Sequence[Segment]) -> dict[str, Any]:
        if len(segments) != len(chain):
            raise Damaged(f"{chain[-1]} is half written, or damaged")
        for link, segment in zip(chain, segments, strict=True):
            check_link(segment, link, self.run)
        found: dict[str, Any] = segments[-1].header["state"]
        return found

    def _fetch(self, choice: Choice) -> list[Segment]:
        """The chain of this rank: from this machine's holder, or sent by another rank."""
        transport, rank = self.transport, self.transport.rank
        opened: dict[int, list[Segment]] = {}  # by owner, of those that this rank reads

        def read() -> None:
            for owner, reader in enumerate(choice.readers):
                if reader == rank:
                    assert self.link is not None
                    opened[owner] = [open_link(self.link, link) for link in choice.chains[owner]]

        run_on_all_ranks(transport, read, Damaged)
        mine = opened.pop(rank, [])
        if any(reader != owner for owner, reader in enumerate(choice.readers)):
            for place in range(max(map(len, choice.chains))):
                outgoing = {
                    owner: segments[place].data
                    for owner, segments in opened.items()
                    if place < len(segments)
                }
                for file in exchange_files(transport, outgoing).values():
                    mine += _open_received(file, choice.chains[rank][len(mine)])
        for segments in opened.values():
            for segment in segments:
                segment.close()
        return mine


def _is_newer(checkpoints: Checkpoints, step: int) -> bool:
    """Whether there is an intact checkpoint after `step`. A collective."""
    try:
        saved = checkpoints.last_intact()
    except Damaged:
        return False
    return saved is not None and int(saved.state["progress"]["step"]) > step


def _open_received(file: int, link: Link) -> list[Segment]:
    try:
        return [Segment.open(file, str(link))]
    except Damaged:  # raised on all ranks together, when they check
        return []


def _refuse_other(
    link: Link, state: dict[str, Any], model: ShardedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Damaged if the state is another model's, or from another kind of device."""
    try:
        refuse_other_model(str(link), state, model, optimizer)
    except ValueError as error:
        raise Damaged(str(error)) from None
    if state["device"] != model.transport.device.type:
        raise Damaged(f"{link} is from ranks on {state['device']}")
