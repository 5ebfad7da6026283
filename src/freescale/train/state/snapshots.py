"""The snapshots of a run, for the training loop: taken during training, restored at its start."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from freescale.embedding.lease import Capture
from freescale.ledger.ledger import ThreadLedger
from freescale.train.state.choice import Link, choose_buddies
from freescale.train.state.exchange import exchange_files
from freescale.train.state.held import HeldChains
from freescale.train.state.holder_link import HolderLink, is_supported, name_holder
from freescale.train.state.memory_chain import describe_segment
from freescale.train.state.memory_contents import CONSUMER, SnapshotContents
from freescale.train.state.pace import Every, Pace, StepCosts
from freescale.train.state.restoring import Restoring, clear_snapshots
from freescale.train.state.segment import Segment, write_segment
from freescale.train.state.state_file import StateFile
from freescale.train.state.writing import await_rows
from freescale.transport.api import Transport, gather_json
from freescale.transport.failures import describe_error, run_on_all_ranks
from freescale.transport.machine import identify_machine
from freescale.transport.threads import start_thread

T = TypeVar("T")


@dataclass
class Taking:
    """A snapshot under way."""

    step: int
    delta: bool
    begin: float
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    seconds: float = 0.0
    processor: float = 0.0  # seconds that threads have computed for it

    def run(self, work: Callable[[], T]) -> T:
        """Does a part of it, on whichever thread."""
        begin = time.thread_time()
        try:
            return work()
        finally:
            self.processor += time.thread_time() - begin


class Snapshots:
    """Takes a snapshot every so many steps, one at a time. Making one, and all methods but
    `abandon`, are collectives.

    Args:
        transport: of the run.
        every: steps between two snapshots; `auto`: as few as cost at most 1 % of training.

    Raises:
        ValueError: this system has no memory files.
    """

    def __init__(self, transport: Transport, every: Every) -> None:
        if not is_supported():
            raise ValueError("--snapshot-every needs memory files, which only Linux has: leave it")
        self.transport, self.pace, self._costs = transport, Pace(every), StepCosts()
        self.machines = transport.gather_bytes(identify_machine())
        self._link: HolderLink | None = None
        self._run = ""  # whose holder that is
        self._held: HeldChains | None = None
        self._channel: Transport | None = None
        self.taking: Taking | None = None  # the one under way, or the last
        self.due = 0  # the step of the next
        self._files: list[StateFile] = []  # two, taken in turn
        self._turn = 0

    @property
    def interval(self) -> int:
        """Steps between two."""
        return self.pace.interval

    # ---- restoring

    def find(self, run: str | None) -> Restoring | None:
        """What holders have of a run; None of one that has no name yet."""
        if run is None:
            return None
        if self._link is None:
            self._link, self._run = HolderLink.connect(self._name(run)), run
        return Restoring(run, self.transport, self._link, self.machines)

    def clear(self) -> None:
        """Forgets all that holders have: the run does not go on from it."""
        if self._link is not None and self._is_first:
            clear_snapshots(self._link)
        self.transport.gather_bytes(b"")  # before anybody adds to it

    def forget(self) -> None:
        """During a run that goes back: what was taken is of a past that it does not have."""
        self._await_last()
        self.clear()
        self.forget_files()

    def forget_files(self) -> None:
        """The next snapshots are whole."""
        assert self._held is not None
        self._held.forget()
        for file in self._files:
            file.current = False

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

        def connect() -> HolderLink:
            link = self._link or HolderLink.connect(self._name(run))
            if link is None:
                raise OSError(f"rank {self.transport.rank} finds no snapshot holder")
            self._files = [StateFile(f"{CONSUMER}/{number}") for number in range(2)]
            return link

        self._link = run_on_all_ranks(self.transport, connect)
        self._held = HeldChains(run, self._link)
        ledger = ThreadLedger(self.transport.ledger, "snapshot")
        self._side, self._channel = ledger, self.transport.channel(ledger)
        buddies, rank = choose_buddies(self.machines), self.transport.rank
        self._buddy = buddies[rank]
        self._proteges = [other for other, buddy in enumerate(buddies) if buddy == rank]
        here = [r for r, machine in enumerate(self.machines) if machine == self.machines[rank]]
        self._owners = {*here, *(other for other, buddy in enumerate(buddies) if buddy in here)}
        self.due = step + self.interval

    def take_if_due(self, state: Any, failed: bool = False) -> dict[str, Any] | None:
        """After a step: begins a snapshot if it is due and the one before is complete on all ranks.
        `failed`, on any rank: the run is about to end, and no rank takes one. Returns a line for
        the log, if the interval grows or costs much."""
        step = state.position.step
        self._costs.note_step()
        if step < self.due:
            return None
        ready, line = self._agree(step, failed)
        self.due = step + self.interval
        if ready:
            self._take(state)
        return line

    def _agree(self, step: int, failed: bool) -> tuple[bool, dict[str, Any] | None]:
        """Whether all ranks are ready for a snapshot, and the line for the log."""
        taking = self.taking
        busy = failed or (taking is not None and not taking.done.is_set())
        timed = taking if taking is not None and taking.delta and not busy else None
        costs = 0.0, 0.0
        if timed is not None:  # what its threads have computed is the least that it costs
            costs = timed.seconds, max(timed.processor, self._costs.estimate())
        looks = gather_json(self.transport, self.pace.look(step, busy, *costs))
        if any(look["busy"] for look in looks):
            return False, None
        self._finish()
        return True, self.pace.agree(looks)

    def _take(self, state: Any) -> None:
        assert self._held is not None
        model, step, rank = state.model, state.position.step, self.transport.rank
        last, file = self._held.find_last(rank), self._files[self._turn]
        spare = self._files[1 - self._turn]
        parent = None if last is None or self._buddy is None else last.step
        sends = "nothing" if self._buddy is None else "whole" if parent is None else "changes"
        usual = file.current and sends != "whole"
        taking = self.taking = Taking(step, usual, time.perf_counter())
        self._costs.note_snapshot(usual)
        contents = taking.run(
            lambda: SnapshotContents.collect(
                model,
                state.optimizer,
                state.describe(),
                state.position.pipeline.reducer,
                file,
                None if spare.current else spare,
                sends,
            )
        )
        contents.state["checkpoint"] = state.checkpoints.describe_parent()
        capture = Capture(lambda: taking.run(contents.add_sharded))
        model.tables.lease.capture(capture)
        sent = Link(self.transport.world, rank, step, parent)

        def run() -> None:
            try:
                taking.run(lambda: self._write(contents, capture, sent))
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                taking.error = error
            taking.seconds = time.perf_counter() - taking.begin
            taking.done.set()

        start_thread("snapshot", run, lambda: None)

    def _finish(self) -> None:
        """Of a snapshot that is complete on all ranks, or failed."""
        taking, self.taking = self.taking, None
        if taking is None:
            return
        if taking.error is None:
            self._turn = 1 - self._turn
            return
        if not isinstance(taking.error, ValueError):  # a rank is gone, or a mistake of ours
            raise taking.error
        assert self._held is not None
        self._held.forget()
        name = Link(self.transport.world, self.transport.rank, taking.step, None).name
        with suppress(OSError):  # the next one is written over it
            self._held.link.drop([name])
        if self.transport.rank == 0:
            message = f"the snapshot after step {taking.step} is left out: {taking.error}"
            warnings.warn(message, stacklevel=2)

    # ---- the snapshot's thread, over its channel

    def _write(self, contents: SnapshotContents, capture: Capture, sent: Link) -> None:
        """`sent`: what a buddy receives. This rank's own file is whole."""
        channel, held = self._channel, self._held
        assert channel is not None and held is not None
        own = Link(sent.ranks, sent.owner, sent.step, None)

        def keep_own() -> Tensor | None:
            await_rows(capture, contents.copies)
            contents.write()
            return self._keep_own(contents, own, sent)

        outgoing = run_on_all_ranks(channel, keep_own)
        received: dict[int, int] = {}
        if len(set(self.machines)) > 1:
            to = {self._buddy: outgoing} if self._buddy is not None and outgoing is not None else {}
            received = exchange_files(channel, to)
        del outgoing

        def keep() -> list[Link]:
            return [self._keep_received(owner, file, sent) for owner, file in received.items()]

        links = [own, *run_on_all_ranks(channel, keep)]
        self._side.take()  # of the ledger: nobody waits for it

        def complete() -> None:
            held.complete(links)
            if self._is_first:
                held.drop_others(self._owners, sent.ranks)

        # Nothing goes anywhere before the new one is there everywhere.
        run_on_all_ranks(channel, complete)
        if contents.spare is not None:
            with suppress(OSError):  # where it does not fit, the next snapshot says so
                contents.spare.copy_tables(contents.file)

    def _keep_own(self, contents: SnapshotContents, own: Link, sent: Link) -> Tensor | None:
        """Puts this rank's file into the holder. Returns the bytes for its buddy."""
        header = describe_segment(self._run, own, contents.state)
        segment = contents.file.seal(header, contents.tensors)
        try:
            self._put(own, segment)
            if contents.sends == "whole":
                return segment.data
        finally:
            segment.close()
        if contents.sends == "nothing":
            return None
        header = describe_segment(self._run, sent, contents.state)
        changes = write_segment(header, contents.list_changes())
        try:
            return changes.data
        finally:
            changes.close()

    def _keep_received(self, owner: int, file: int, like: Link) -> Link:
        link = Link(like.ranks, owner, like.step, like.parent)
        segment = Segment.open(file, f"the copy of rank {owner}'s snapshot")
        try:
            self._put(link, segment)
        finally:
            segment.close()
        return link

    def _put(self, link: Link, segment: Segment) -> None:
        assert self._held is not None
        try:
            self._held.keep(link, segment)
        except OSError as error:
            with_it = HolderLink.start(self._name(self._run))  # for the next one, which is whole
            self._link = self._held.link = with_it
            raise ValueError(f"{describe_error(error)}; another was started") from error

    # ---- the end

    def close(self, state: Any) -> None:
        """Of a run that is over: the holders end, and the memory is free."""
        if self.taking is not None:
            state.model.tables.lease.finish_captures()
            self._await_last()
        self.transport.gather_bytes(b"")  # nobody needs them any more
        self.abandon(end=True)
        for file in self._files:
            file.close()
        self._files = []

    def _await_last(self) -> None:
        """Whatever has become of it."""
        if self.taking is not None:
            self.taking.done.wait()
            self.taking = None

    def abandon(self, end: bool) -> None:
        """Of a run that has failed: with `end` its holder ends at once, otherwise once nobody has
        come back for a while."""
        if self._link is not None:
            if end and self._is_first:
                self._link.end()
            else:
                self._link.close()
            self._link = None

    @property
    def _is_first(self) -> bool:
        """Of the ranks on this machine."""
        rank = self.transport.rank
        return self.machines.index(self.machines[rank]) == rank

    def _name(self, run: str) -> str:
        return name_holder(run, self.machines[self.transport.rank])
