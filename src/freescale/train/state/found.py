"""The snapshots of a run in memory, as the ranks of a new attempt find them."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.sharded_model import ShardedModel
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.disk import Damaged
from freescale.train.state.file_reads import FileReads
from freescale.train.state.held import Choice, Held, choose_snapshots, explain_none
from freescale.train.state.holder_link import HolderLink
from freescale.train.state.memory import Segment, exchange_files
from freescale.train.state.model import place_as_saved, refuse_other_model
from freescale.train.state.restore import load_snapshot
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
    ) -> tuple[Choice, dict[str, Any]] | None:
        """Restores the newest state of the run if that is in memory; a snapshot that is damaged is
        passed over with a warning. Returns it and its JSON; None if there is no snapshot, or an
        intact checkpoint is newer."""
        while (choice := self.choose()) is not None:
            if checkpoints.last_step() > choice.step and _is_newer(checkpoints, choice.step):
                return None
            try:
                return choice, self.load(choice, model, optimizer)
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
    ) -> dict[str, Any]:
        """Restores this rank, and returns the JSON of its snapshot. Damaged, on all ranks, if it is
        half written, damaged, another run's or another model's: nothing is restored then."""
        transport = self.transport
        own = Held(transport.world, transport.rank, choice.step)
        with ExitStack() as stack:
            segment = self._fetch(choice, own, stack)
            reads = stack.enter_context(closing(FileReads()))
            state: dict[str, Any] = segment.header["state"]
            place_as_saved(model, state)

            def verify() -> dict[str, Tensor]:
                _refuse_other(own, state, model, optimizer)
                return segment.verify(str(own), reads.threads)

            tensors = run_on_all_ranks(transport, verify, Damaged)

            def copy(name: str, to: Tensor) -> None:
                segment.copy(name, to, reads)

            load_snapshot(state, tensors, model, optimizer, copy)
            return state

    def _fetch(self, choice: Choice, own: Held, stack: ExitStack) -> Segment:
        """The file of this rank: from this machine's holder, or sent by another rank."""
        opened: dict[int, Segment] = {}  # by owner
        received: dict[int, int] = {}  # by the rank that has read it

        def read() -> None:
            for owner, reader in enumerate(choice.readers):
                if reader == own.owner:
                    segment = self._open(Held(own.ranks, owner, own.step))
                    opened[owner] = stack.enter_context(closing(segment))

        run_on_all_ranks(self.transport, read, Damaged)
        mine = opened.pop(own.owner, None)
        if any(reader != owner for owner, reader in enumerate(choice.readers)):
            outgoing = {owner: segment.data for owner, segment in opened.items()}
            received = exchange_files(self.transport, outgoing)

        def check() -> Segment:
            segment = mine
            if segment is None:
                file = received[choice.readers[own.owner]]
                segment = stack.enter_context(closing(Segment.open(file, str(own))))
            own.check(segment, self.run)
            return segment

        return run_on_all_ranks(self.transport, check, Damaged)

    def _open(self, held: Held) -> Segment:
        """OSError if this machine's holder does not have it, Damaged if it is half written."""
        assert self.link is not None
        file = self.link.get(held.name)
        if file is None:
            raise OSError(f"the holder has no {held.name}")
        return Segment.open(file, str(held))


def _is_newer(checkpoints: Checkpoints, step: int) -> bool:
    """Whether there is an intact checkpoint after `step`. A collective."""
    try:
        saved = checkpoints.last_intact()
    except Damaged:
        return False
    return saved is not None and int(saved.state["progress"]["step"]) > step


def _refuse_other(
    held: Held, state: dict[str, Any], model: ShardedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Damaged if the state is another model's, or from another kind of device."""
    try:
        refuse_other_model(str(held), state, model, optimizer)
    except ValueError as error:
        raise Damaged(str(error)) from None
    if state["device"] != model.transport.device.type:
        raise Damaged(f"{held} is from ranks on {state['device']}")
