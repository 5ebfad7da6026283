"""The snapshots of a run, for the training loop: taken during training, restored at its start."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from freescale.embedding.tables import Tables
from freescale.kernels.native import explain_missing_native, load_native
from freescale.ledger.ledger import ThreadLedger
from freescale.train.state.contents import CONSUMER, MemoryContents
from freescale.train.state.copies import Job
from freescale.train.state.found import FoundSnapshots
from freescale.train.state.held import Held, choose_buddies, find_superfluous, parse_names
from freescale.train.state.holder_link import HolderLink, is_supported, name_holder
from freescale.train.state.memory import Segment, StateFile, exchange_files, write_segment
from freescale.train.state.pace import Every, Pace, StepCosts
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import describe_error, run_on_all_ranks
from freescale.transport.machine import identify_machine


class Taking(Job):
    """A snapshot in progress. `usual`: it costs what most do."""

    def __init__(self, device: torch.device, step: int, usual: bool) -> None:
        super().__init__(device)
        self.step, self.usual = step, usual


class Snapshots:
    """Takes a snapshot every few steps, one at a time; `auto`: as few as cost at most 1 % of
    training. Making one, and all methods except `abandon`, are collectives. ValueError if this
    system has no memory files, or a rank no C compiler."""

    def __init__(self, transport: Transport, every: Every) -> None:
        if not is_supported():
            raise ValueError("--snapshot-every needs memory files, which only Linux has: leave it")
        run_on_all_ranks(transport, _require_compiler)
        self.transport, self.pace, self._costs = transport, Pace(every), StepCosts()
        self.machines = transport.gather_bytes(identify_machine())
        here, rank = self.machines[transport.rank], transport.rank
        self._is_first = self.machines.index(here) == rank  # of the ranks on this machine
        buddies = choose_buddies(self.machines)
        self._buddy = buddies[rank]
        # Ranks whose states this rank keeps, and those whose states this machine's holder has.
        self._keeps = [rank, *(owner for owner, buddy in enumerate(buddies) if buddy == rank)]
        self._owners = {
            owner
            for owner, buddy in enumerate(buddies)
            if self.machines[owner] == here or (buddy is not None and self.machines[buddy] == here)
        }
        self._link: HolderLink | None = None
        self._run = ""  # whose holder that is
        self._channel: Transport | None = None
        self.taking: Taking | None = None  # in progress, or the last
        self.due = 0  # the step of the next
        # By owner, two: the next one's, and the last complete one's.
        self._files: dict[int, list[StateFile]] = {}

    @property
    def interval(self) -> int:
        """Steps between two."""
        return self.pace.interval

    # ---- restoring

    def find(self, run: str | None) -> FoundSnapshots | None:
        """What holders have of a run; None of one that has no name yet."""
        if run is None:
            return None
        if self._link is None:
            self._link, self._run = HolderLink.connect(self._name(run)), run
        return FoundSnapshots(run, self.transport, self._link, self.machines)

    def clear(self) -> None:
        """Removes all that holders have: the run does not continue from it."""
        if self._link is not None and self._is_first:
            self._link.drop(self._link.list())
        self.transport.gather_bytes(b"")  # before anybody adds to it

    def forget(self) -> None:
        """During a run that goes back: earlier snapshots are of a past that it does not have."""
        self._await_last()
        self.clear()
        self.forget_files()

    def forget_files(self) -> None:
        """The next snapshots are whole."""
        for file in chain.from_iterable(self._files.values()):
            file.step = None

    # ---- taking

    def open(self, run: str, step: int) -> None:
        """Starts the holders that are missing, before the first step after `step`."""
        if self._run != run:  # a run that has begun anew, or gone back
            self.abandon(end=True)
        self._run = run

        def start() -> None:
            if self._is_first and self._link is None:
                self._link = HolderLink.start(self._name(run))

        run_on_all_ranks(self.transport, start)

        def connect() -> None:
            self._link = self._link or HolderLink.connect(self._name(run))
            if self._link is None:
                raise OSError(f"rank {self.transport.rank} finds no snapshot holder")
            if self._is_first:
                self._give_up_after(step)

        run_on_all_ranks(self.transport, connect)
        self._files = {
            owner: [StateFile(f"{CONSUMER}/{number}") for number in range(2)]
            for owner in self._keeps
        }
        self._side = ThreadLedger(self.transport.ledger, "snapshot")
        self._channel = self.transport.channel(self._side)
        self.due = step + self.interval

    def take_if_due(
        self,
        step: int,
        tables: Tables,
        collect: Callable[[MemoryContents], None],
        failed: bool = False,
    ) -> dict[str, Any] | None:
        """After a step: begins a snapshot, which `collect` fills, if it is due and the one before
        is complete on all ranks; none if any rank passes `failed`, because the run is about to end.
        Returns a line for the log, if the interval grows or costs much."""
        self._costs.note_step()
        if step < self.due:
            return None
        ready, line = self._agree(step, failed)
        self.due = step + self.interval
        if ready:
            self._take(step, tables, collect)
        return line

    def _agree(self, step: int, failed: bool) -> tuple[bool, dict[str, Any] | None]:
        """Whether all ranks are ready for a snapshot, and the line for the log."""
        taking = self.taking
        busy = failed or (taking is not None and not taking.done.is_set())
        costs = 0.0, 0.0
        if taking is not None and taking.usual and not busy:
            # what its threads have computed is the least that it costs
            costs = taking.seconds, max(taking.processor, self._costs.estimate())
        looks = gather_json(self.transport, self.pace.look(step, busy, *costs))
        if any(look["busy"] for look in looks):
            return False, None
        self._finish()
        return True, self.pace.agree(looks)

    def _take(self, step: int, tables: Tables, collect: Callable[[MemoryContents], None]) -> None:
        rank, world = self.transport.rank, self.transport.world
        file, last = self._files[rank]
        taking = self.taking = Taking(self.transport.device, step, usual=file.current)
        self._costs.note_snapshot(taking.usual)
        contents = MemoryContents(
            copies=taking.copies,
            file=file,
            spare=None if last.current else last,
        )
        ready = taking.copy(tables, lambda: collect(contents), contents.add_sharded)
        taking.start("snapshot", lambda: self._write(contents, ready, Held(world, rank, step)))

    def _finish(self) -> None:
        """Ends a snapshot that is complete on all ranks, or failed."""
        taking, self.taking = self.taking, None
        if taking is None:
            return
        if taking.error is None:
            for files in self._files.values():
                files.reverse()
            return
        if not isinstance(taking.error, ValueError):  # a rank is gone, or our own mistake
            raise taking.error
        for file, _ in self._files.values():  # it is complete on some ranks, perhaps
            file.step = None
        with suppress(OSError):  # the next one replaces it
            self._give_up_after(taking.step - 1)
        if self.transport.rank == 0:
            message = f"the snapshot after step {taking.step} is left out: {taking.error}"
            warnings.warn(message, stacklevel=2)

    def _give_up_after(self, step: int) -> None:
        """Removes later states from the holder: the run did not continue from them."""
        assert self._link is not None
        held = parse_names(self._link.list())
        self._link.drop([each.name for each in held if each.step > step])

    # ---- the snapshot's thread, over its channel

    def _write(self, contents: MemoryContents, ready: Callable[[], None], own: Held) -> None:
        channel = self._channel
        assert channel is not None

        def keep_own() -> Tensor | None:
            ready()
            contents.write()
            return self._keep_own(contents, own)

        outgoing = run_on_all_ranks(channel, keep_own)
        received: dict[int, int] = {}
        if outgoing is not None:
            assert self._buddy is not None
            received = exchange_files(channel, {self._buddy: outgoing})
            del outgoing
        run_on_all_ranks(channel, lambda: self._keep_received(received, own))
        self._side.take()  # of the ledger: nobody waits for it
        # Nothing is removed anywhere before the new one is there everywhere.
        run_on_all_ranks(channel, lambda: self._complete(own))
        if contents.spare is not None:
            with suppress(OSError):  # if it does not fit, the next snapshot reports it
                contents.spare.copy_tables(contents.file)

    def _keep_own(self, contents: MemoryContents, own: Held) -> Tensor | None:
        """Hands this rank's file to the holder. Returns the bytes for its buddy, if it has one."""
        header = own.describe(self._run, contents.state)
        with closing(contents.file.seal(header, contents.tensors)) as segment:
            self._put(own, segment)
            if self._buddy is None:
                return None
            if contents.since is None:
                return segment.data
        changes = write_segment(header | {"since": contents.since}, contents.list_changes())
        with closing(changes):
            return changes.data

    def _keep_received(self, received: Mapping[int, int], own: Held) -> None:
        """Brings the copies of other ranks' files up to date and hands them to the holder."""
        for owner, descriptor in received.items():
            held, (file, last) = Held(own.ranks, owner, own.step), self._files[owner]
            label = f"the copy of {held}"
            with closing(Segment.open(descriptor, label)) as segment:
                since = segment.header.get("since")
                rest = file.update(since, segment.verify(label), last)
                header = held.describe(self._run, segment.header["state"])
                with closing(file.seal(header, rest)) as sealed:
                    self._put(held, sealed)

    def _put(self, held: Held, segment: Segment) -> None:
        assert self._link is not None
        try:
            self._link.put(held.name, segment.file)
        except OSError as error:
            self._link = HolderLink.start(self._name(self._run))  # for the next one
            raise ValueError(f"{describe_error(error)}; another was started") from error

    def _complete(self, own: Held) -> None:
        """Frees memory of this machine's holder."""
        if self._is_first:
            assert self._link is not None
            self._link.drop(find_superfluous(self._link.list(), self._owners, own))

    # ---- the end

    def close(self, tables: Tables) -> None:
        """Ends the holders of a run that is over: the memory is free."""
        if self.taking is not None:
            tables.lease.finish_captures()
            self._await_last()
        self.transport.gather_bytes(b"")  # nobody needs them any more
        self.abandon(end=True)
        for file in chain.from_iterable(self._files.values()):
            file.close()
        self._files = {}

    def _await_last(self) -> None:
        """Waits for the last one, whether it succeeds or not."""
        if self.taking is not None:
            self.taking.done.wait()
            self.taking = None

    def abandon(self, end: bool) -> None:
        """Leaves a failed run; its holder ends at once with `end`, else if nobody comes back."""
        if self._link is not None:
            if end and self._is_first:
                self._link.end()
            else:
                self._link.close()
            self._link = None

    def _name(self, run: str) -> str:
        return name_holder(run, self.machines[self.transport.rank])


def _require_compiler() -> None:
    """Checksums that follow replaced rows are C."""
    if load_native() is None:
        raise ValueError(f"--snapshot-every needs a C compiler: {explain_missing_native()}")
