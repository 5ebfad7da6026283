"""The snapshots of a run, for the training loop: taken beside training, restored at its start."""

from __future__ import annotations

import json
import threading
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from freescale.embedding.capture import Capture
from freescale.ledger.ledger import ThreadLedger
from freescale.train.checkpoint.on_all_ranks import describe_error, run_on_all_ranks
from freescale.train.checkpoint.writing import await_rows
from freescale.train.snapshot.chain import describe_segment
from freescale.train.snapshot.choice import Link, choose_buddies, choose_interval
from freescale.train.snapshot.contents import SnapshotContents
from freescale.train.snapshot.exchange import exchange_files
from freescale.train.snapshot.held import HeldChains
from freescale.train.snapshot.keeper_link import KeeperLink, is_supported, name_keeper
from freescale.train.snapshot.restoring import Restoring, clear_snapshots
from freescale.train.snapshot.segment import Segment, write_segment
from freescale.transport.api import Transport
from freescale.transport.machine import identify_machine
from freescale.transport.threads import start_thread, wait_for_event

if TYPE_CHECKING:
    from freescale.train.run_state import RunState


@dataclass
class _Taking:
    """A snapshot under way."""

    step: int
    delta: bool
    begin: float
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    seconds: float = 0.0


class Snapshots:
    """Takes a snapshot every so many steps, one at a time. Making one, and all methods but
    `abandon`, are collectives.

    Args:
        transport: of the run.
        every: steps between two snapshots.

    Raises:
        ValueError: this system has no memory files.
    """

    def __init__(self, transport: Transport, every: int) -> None:
        if not is_supported():
            raise ValueError("--snapshot-every needs memory files, which only Linux has: leave it")
        self.transport, self.every = transport, every
        self.interval = every  # steps between two, as many as keep up
        self.machines = transport.gather_bytes(identify_machine())
        self._link: KeeperLink | None = None
        self._held: HeldChains | None = None
        self._channel: Transport | None = None
        self._taking: _Taking | None = None
        self._due = 0
        self._clock: tuple[int, float] | None = None  # the last look: step, time

    # ---- restoring

    def find(self, run: str | None) -> Restoring | None:
        """What keepers have of a run; None of one that has no name yet."""
        if run is None:
            return None
        if self._link is None:
            self._link = KeeperLink.connect(self._name(run))
        return Restoring(run, self.transport, self._link, self.machines)

    def clear(self) -> None:
        """Forgets all that keepers have: the run does not go on from it."""
        if self._link is not None and self._is_first:
            clear_snapshots(self._link)
        self.transport.gather_bytes(b"")  # before anybody adds to it

    def forget(self) -> None:
        """During a run that goes back: what was taken is of a past that it does not have."""
        self._await_last()
        self.clear()
        assert self._held is not None
        self._held.forget()

    # ---- taking

    def open(self, run: str, step: int) -> None:
        """Starts the keepers that are missing, before the first step after `step`."""

        def start() -> None:
            if self._is_first and self._link is None:
                self._link = KeeperLink.start(self._name(run))

        run_on_all_ranks(self.transport, start)

        def connect() -> KeeperLink:
            link = self._link or KeeperLink.connect(self._name(run))
            if link is None:
                raise OSError(f"rank {self.transport.rank} finds no keeper of snapshots")
            return link

        self._link = run_on_all_ranks(self.transport, connect)
        self._held, self._run = HeldChains(run, self._link), run
        ledger = ThreadLedger(self.transport.ledger, "snapshot")
        self._side, self._channel = ledger, self.transport.channel(ledger)
        buddies, rank = choose_buddies(self.machines), self.transport.rank
        self._buddy = buddies[rank]
        self._proteges = [other for other, buddy in enumerate(buddies) if buddy == rank]
        here = [r for r, machine in enumerate(self.machines) if machine == self.machines[rank]]
        self._owners = {*here, *(other for other, buddy in enumerate(buddies) if buddy in here)}
        self._due = step + self.interval

    def take_if_due(self, state: RunState) -> dict[str, Any] | None:
        """After a step: begins a snapshot if it is due and the one before is complete on all
        ranks.

        Returns:
            For the log, when the interval has to grow: its `steps`, those `asked` for, and the
            `seconds` that a snapshot takes.
        """
        step = state.position.step
        if step < self._due:
            return None
        grown = self._agree(step)
        self._due = step + self.interval
        if self._taking is None:
            self._take(state)
        return grown

    def _agree(self, step: int) -> dict[str, Any] | None:
        """Whether the last snapshot is complete is for all ranks to say."""
        now, taking = time.perf_counter(), self._taking
        busy = taking is not None and not taking.done.is_set()
        per_step = 0.0
        if self._clock is not None and step > self._clock[0]:
            per_step = (now - self._clock[1]) / (step - self._clock[0])
        self._clock = step, now
        seconds = taking.seconds if taking is not None and taking.delta and not busy else 0.0
        mine = [busy, seconds, choose_interval(self.every, seconds, per_step)]
        said = [json.loads(part) for part in self.transport.gather_bytes(json.dumps(mine).encode())]
        if any(is_busy for is_busy, _, _ in said):
            return None
        self._finish()
        least = max(interval for _, _, interval in said)
        if least <= self.interval:
            return None
        self.interval = least
        longest = max(took for _, took, _ in said)
        return {"steps": least, "asked": self.every, "seconds": round(longest, 3)}

    def _take(self, state: RunState) -> None:
        assert self._held is not None
        model, step, rank = state.model, state.position.step, self.transport.rank
        last = self._held.find_last(rank)
        parent = None if last is None else last.step
        contents = SnapshotContents.collect(
            model,
            state.optimizer,
            state.describe(),
            state.position.pipeline.reducer,
            delta=parent is not None,
        )
        contents.state["checkpoint"] = state.checkpoints.describe_parent()
        taking = self._taking = _Taking(step, parent is not None, time.perf_counter())
        capture = Capture(contents.add_sharded)
        model.tables.capture(capture)
        link = Link(self.transport.world, rank, step, parent)

        def run() -> None:
            try:
                self._write(contents, capture, link)
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                taking.error = error
            taking.seconds = time.perf_counter() - taking.begin
            taking.done.set()

        start_thread("snapshot", run, lambda: None)

    def _finish(self) -> None:
        """Of a snapshot that is complete on all ranks, or failed."""
        taking, self._taking = self._taking, None
        if taking is None or taking.error is None:
            return
        if not isinstance(taking.error, ValueError):  # a rank is gone, or a mistake of ours
            raise taking.error
        assert self._held is not None
        self._held.forget()
        if self.transport.rank == 0:
            words = f"the snapshot after step {taking.step} is left out: {taking.error}"
            warnings.warn(words, stacklevel=2)

    # ---- the snapshot's thread, over its channel

    def _write(self, contents: SnapshotContents, capture: Capture, link: Link) -> None:
        channel, held = self._channel, self._held
        assert channel is not None and held is not None
        segment = run_on_all_ranks(channel, lambda: self._keep_own(contents, capture, link))
        try:
            outgoing = {} if self._buddy is None else {self._buddy: segment.data}
            received = exchange_files(channel, outgoing) if len(set(self.machines)) > 1 else {}
            del outgoing
        finally:
            segment.close()

        def keep() -> list[Link]:
            return [self._keep_received(owner, file, link) for owner, file in received.items()]

        links = [link, *run_on_all_ranks(channel, keep)]
        self._side.take()  # of the ledger: nobody waits for it

        def complete() -> None:
            held.complete(links)
            if self._is_first:
                held.drop_others(self._owners, link.ranks)

        # Nothing goes anywhere before the new one is there everywhere.
        run_on_all_ranks(channel, complete)

    def _keep_own(self, contents: SnapshotContents, capture: Capture, link: Link) -> Segment:
        await_rows(capture)
        if contents.copied is not None:
            wait_for_event(contents.copied)
        contents.pack_marks()
        segment = write_segment(describe_segment(self._run, link, contents.state), contents.tensors)
        contents.tensors.clear()
        try:
            self._put(link, segment)
        except BaseException:
            segment.close()
            raise
        return segment

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
            with_it = KeeperLink.start(self._name(self._run))  # for the next one, which is whole
            self._link = self._held.link = with_it
            raise ValueError(f"{describe_error(error)}; another was started") from error

    # ---- the end

    def close(self, state: RunState) -> None:
        """Of a run that is over: the keepers end, and the memory is free."""
        if self._taking is not None:
            state.model.tables.finish_captures()
            self._await_last()
        self.transport.gather_bytes(b"")  # nobody needs them any more
        self.abandon(end=True)

    def _await_last(self) -> None:
        """Whatever has become of it."""
        if self._taking is not None:
            self._taking.done.wait()
            self._taking = None

    def abandon(self, end: bool) -> None:
        """Of a run that has failed: with `end` its keeper ends at once, otherwise once nobody has
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
        return name_keeper(run, self.machines[self.transport.rank])
