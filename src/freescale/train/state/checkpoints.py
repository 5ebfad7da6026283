"""The checkpoints of a run: saved and loaded by all ranks together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from freescale.config import TrainConfig
from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.tables import Tables
from freescale.stores.path import as_path
from freescale.train.state.contents import (
    DiskContents,
    follow_changes,
    is_followed,
    refuse_unsavable,
)
from freescale.train.state.copies import Job
from freescale.train.state.disk import (
    DELTA_FORMAT,
    FORMAT,
    CheckpointFolder,
    find_expired,
    parse_step,
)
from freescale.train.state.intact import (
    Intact,
    Parent,
    find_checkpoint,
    last_intact,
    list_steps,
    verify_checkpoint,
)
from freescale.train.state.restore import load_checkpoint
from freescale.train.state.stored import open_folder
from freescale.train.state.writing import write_checkpoint
from freescale.train.torch_files.tensor_writer import TensorWriter
from freescale.transport.api import Transport
from freescale.transport.failures import run_on_all_ranks, run_on_rank_0
from freescale.transport.process_group import ProcessGroupTransport


class Publishing(Protocol):
    """Publishes checkpoints, on a thread of its own."""

    def publish(self, checkpoint: Path) -> None: ...
    def wait(self) -> None: ...


class Checkpoints:
    """The checkpoints in a folder. `check`, `save`, `wait`, `load`, `find` and `last_intact` are
    collectives.

    A folder holds one run. Steps ahead of the one that is saved are refused: they belong to another
    run. After an earlier one was loaded with its optimizer, `check` with a step, or the next save,
    gives up the later ones: they are renamed to `given-up-*`, and the next save removes them.

    Args:
        folder: where the checkpoints are, one folder `step-00000100` each.
        transport: what `connect` returned; `sharded.transport`.
        keep: how many checkpoints stay, and what they depend on; a save removes older ones.
        full_every: write a full checkpoint every so many; the others are deltas, which hold only
            those table rows that changed since the one before.
        asynchronous: `save` copies what it writes into host memory and returns; writing happens
            during training. The next save, or `wait`, raises what went wrong.
        publishes: full ones, too, name the rows that changed since the one before, and `publisher`
            of rank 0 is called with each checkpoint that is in place.

    Raises:
        ValueError: `keep` or `full_every` is less than 1.
    """

    def __init__(
        self,
        folder: str | Path,
        transport: Transport,
        keep: int = TrainConfig.keep_checkpoints,
        *,
        full_every: int = TrainConfig.full_every,
        asynchronous: bool = TrainConfig.async_checkpoints,
        publishes: bool = False,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        if full_every < 1:
            raise ValueError(f"full_every must be at least 1, got {full_every}")
        self.folder = as_path(folder)
        self.transport = transport
        self.keep = max(keep, 2) if publishes else keep
        self.publishes = publishes
        self.publisher: Publishing | None = None
        self.full_every = full_every
        self.asynchronous = asynchronous
        self._files: CheckpointFolder | None = None
        self._restored: int | None = None  # the step that was loaded, to continue from
        self._parent: Parent | None = None
        self._saving: Parent | None = None  # of the next one, once this one is in place
        self._job: Job | None = None  # which writes an asynchronous one
        self._finished: Path | None = None  # since `wait` was last called
        self._control: Transport | None = None  # of the thread that writes
        self._writer = TensorWriter(paced=asynchronous)

    def __repr__(self) -> str:
        steps = self.steps()
        last = f", last step {steps[-1]}" if steps else ""
        return f"Checkpoints({str(self.folder)!r}, {len(steps)} saved{last}, keep={self.keep})"

    @property
    def files(self) -> CheckpointFolder:
        if self._files is None or self._files.folder != self.folder:
            self._files = open_folder(self.folder)
        return self._files

    @property
    def _consumer(self) -> str:
        """The name for which rows are marked as changed."""
        return f"checkpoints in {self.folder.absolute()}"

    # ---- which there are

    def steps(self) -> list[int]:
        return self.files.steps()

    def path(self, step: int) -> Path:
        return self.files.path(step)

    def latest(self) -> Path | None:
        """The last one by its name; its files are not verified, as `last_intact` does."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of a step, by its name. A collective: rank 0 looks."""
        return step in list_steps(self.files, self.transport)

    def last_step(self) -> int:
        """The last step by its name, 0 if there is none. A collective: rank 0 looks."""
        return max(list_steps(self.files, self.transport), default=0)

    def last_intact(self) -> Intact | None:
        """The last checkpoint, for `load`; if it is damaged, the one before, with a warning."""
        self._complete_or_warn()
        return last_intact(self.folder, self.transport)

    def find(self, name: str | None) -> Intact:
        """The checkpoint `last`, `best` or of a step; None: the best of a run that keeps it, else
        the last. ValueError if there is none."""
        self._complete_or_warn()
        return find_checkpoint(self.folder, name, self.transport)

    # ---- save

    def check(
        self, model: ShardedModel, optimizer: torch.optim.Optimizer, step: int | None = 0
    ) -> None:
        """Refuses, before training, what could not be saved later. Gives up the checkpoints after
        one that was loaded: if the run ends before its next one, it continues from that.

        Args:
            model: to be saved.
            optimizer: of its dense parameters.
            step: where training begins. None leaves the folder as it is, and unchecked.

        Raises:
            ValueError: names what a checkpoint cannot hold, or checkpoints ahead of `step`.
        """
        if step is not None:
            self.give_up_later()
            self._run_on_rank_0(lambda: self.files.refuse_ahead(step))
        run_on_all_ranks(self.transport, lambda: refuse_unsavable(model, optimizer))

    def claim(self) -> None:
        """Makes this run the only one that writes the folder, if it is in a store; on a disk, the
        lock of the run's folder does that. A collective."""
        self._run_on_rank_0(self.files.claim)

    def close(self) -> None:
        """Lets other runs write the folder."""
        if self._files is not None:
            self._files.close()

    def save(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        protected: Collection[int] = (),
    ) -> Path:
        """Writes a checkpoint, or begins to if they are asynchronous. A collective.

        Args:
            model: what `parallelize` returned.
            optimizer: of its dense parameters.
            progress: plain JSON with at least `step` (`pipeline.steps`): where the run stands, for
                instance `pipeline.state_dict()` and the position of the data.
            protected: steps whose checkpoints stay in addition to the last `keep`.

        Returns:
            The checkpoint's folder; an asynchronous one is there after `wait`.

        Raises:
            ValueError: something cannot be saved or written, on all ranks; of an asynchronous
                checkpoint it is raised by the next call, or by `wait`.
            NotFinite: a weight or optimizer state is not finite.
        """
        if not isinstance(progress, Mapping) or "step" not in progress:
            raise ValueError(
                f"progress is {progress!r} and has no 'step': give {{'step': pipeline.steps, ...}}"
            )
        self._complete()
        self._finished = None
        self.give_up_later()
        step, tables = int(progress["step"]), model.tables
        parent = self._find_parent(tables, step)
        whole = parent is None or parent.deltas + 1 >= self.full_every
        self._job = Job(self.transport.device) if self.asynchronous else None
        contents = DiskContents(
            copies=None if self._job is None else self._job.copies,
            consumer=self._consumer if self._follows else None,
            whole=whole,
            spans=None if parent is None or (whole and not self.publishes) else {},
        )

        def collect() -> None:
            contents.collect(model, optimizer, progress)
            contents.state["format"] = FORMAT if whole else DELTA_FORMAT
            if parent is not None and contents.spans is not None:
                before = {"step": parent.step, "checksum": parent.checksum}
                contents.state["since" if whole else "parent"] = before

        deltas = 0 if whole or parent is None else parent.deltas + 1
        self._parent, self._saving = None, Parent(step, None, deltas, tables)
        if self._job is not None:
            self._save_in_background(self._job, contents, collect, protected)
        else:
            tables.lease.flush()

            def collect_now() -> None:
                collect()
                contents.add_sharded()

            self._finish(lambda: self._write(contents, collect_now, protected, self.transport))
        return self.path(step)

    def _save_in_background(
        self,
        job: Job,
        contents: DiskContents,
        collect: Callable[[], None],
        protected: Collection[int],
    ) -> None:
        """No rank waits for another here: the thread that writes reports what went wrong, once it
        has the rows. Until then it leaves the interpreter to the step."""
        assert self._saving is not None
        if self._control is None:  # a group for the thread's control messages
            self._control = self.transport
            if isinstance(self.transport, ProcessGroupTransport):
                self._control = self.transport.open_control()
        control = self._control
        ready = job.copy(self._saving.tables, collect, contents.add_sharded)
        job.start("checkpoint", lambda: self._write(contents, ready, protected, control))

    def _write(
        self,
        contents: DiskContents,
        ready: Callable[[], None],
        protected: Collection[int],
        control: Transport,
    ) -> None:
        """Writes the checkpoint that is being saved, once its contents are `ready`."""
        saving, files = self._saving, self.files
        assert saving is not None
        run_on_all_ranks(control, ready)
        self._run_on_rank_0(lambda: files.refuse_ahead(saving.step), control)
        saving.checksum = write_checkpoint(files, contents, control, self._writer)
        if self.publishes:
            self._run_on_rank_0(lambda: self._publish(files.path(saving.step)), control)
        self._run_on_rank_0(lambda: self._remove_old(saving.step, protected), control)

    def _publish(self, path: Path) -> None:
        """Begins to; the one before is published before its files may be removed."""
        if self.publisher is not None:
            self.publisher.wait()
            self.publisher.publish(path)

    def wait_published(self) -> None:
        """Waits until the last checkpoint is published. A collective."""

        def wait() -> None:
            if self.publisher is not None:
                self.publisher.wait()

        if self.publishes:
            self._run_on_rank_0(wait)

    def wait(self) -> Path | None:
        """Waits for the checkpoint that is being written. A collective.

        Returns:
            The folder of the checkpoint that was finished since the last call, if there is one.

        Raises:
            ValueError: it could not be written, on all ranks.
            NotFinite: a weight or optimizer state was not finite.
        """
        self._complete()
        finished, self._finished = self._finished, None
        return finished

    def _complete(self) -> None:
        if self._saving is not None and self._job is not None:
            self._saving.tables.lease.finish_captures()
            self._finish(self._job.wait)

    def _complete_or_warn(self) -> None:
        """Before a search: a checkpoint that cannot be written leaves those before it."""
        try:
            self._complete()
        except ValueError as error:  # on all ranks
            if self.transport.rank == 0:
                warnings.warn(f"{error}. Taking one before", stacklevel=4)

    def _finish(self, write: Callable[[], None]) -> None:
        """Once the checkpoint is in place, the next one may hold what changes from here on; until
        then, nothing counts as changed since it."""
        saving = self._saving
        assert saving is not None
        try:
            write()
        finally:
            self._saving = None
        self._parent, self._finished = saving, self.path(saving.step)

    @property
    def _follows(self) -> bool:
        """Whether rows that change are marked."""
        return self.full_every > 1 or self.publishes

    def _find_parent(self, tables: Tables, step: int) -> Parent | None:
        """The checkpoint since which changes are marked, if it is in place; None: the next one can
        only be full. A collective if changes are marked: rank 0 sees the folder."""
        if not self._follows:
            return None
        parent, known = self._parent, b""
        if parent is None or not parent.fits(tables, self._consumer, step):
            parent = None
        elif self.transport.rank == 0:
            known = b"1" * parent.is_in_place(self.files)
        return parent if self.transport.gather_bytes(known)[0] else None

    def _run_on_rank_0(
        self, work: Callable[[], object], transport: Transport | None = None
    ) -> None:
        run_on_rank_0(transport or self.transport, work, str(self.folder))

    def _remove_old(self, saved: int, protected: Collection[int]) -> None:
        """Removes those given up, and all except the last `keep`, the protected, and what these
        depend on."""
        files = self.files
        files.remove(find_expired(files.parents(), saved, self.keep, protected))
        files.remove_given_up()

    # ---- for snapshots, which hold the marks of changed rows

    def describe_parent(self) -> dict[str, Any] | None:
        """The checkpoint since which changes of rows are marked, for a snapshot of this step. One
        that is being written has no checksum yet."""
        parent = self._saving or self._parent
        if parent is None:
            return None
        return {"step": parent.step, "deltas": parent.deltas, "checksum": parent.checksum}

    def adopt_parent(self, described: Mapping[str, Any] | None, tables: Tables, step: int) -> None:
        """After a snapshot of `step` was restored: the next checkpoint may be a delta to the one
        that `describe_parent` named, if that is in its place then."""
        self._parent = None
        if described is not None and self._follows and is_followed(tables, self._consumer):
            # rank 0's counts, which named it or has it here
            named = described.get("checksum") if self.transport.rank == 0 else 0
            checksum = self.files.sum_state(described["step"]) if named is None else named
            self._parent = Parent(described["step"], checksum, described["deltas"], tables)
        self._note_restored(step)

    # ---- load

    def load(
        self,
        checkpoint: Path | Intact,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Restores tables, dense weights and, with an optimizer, its state and the random state. A
        collective.

        Args:
            checkpoint: a checkpoint's folder, or what `last_intact` returned.
            model: the model, on any number of ranks.
            optimizer: of its dense parameters. Its settings (learning rate, weight decay, ...) stay
                as they are: they may have changed on purpose.

        Returns:
            The progress that was saved.

        Raises:
            ValueError: the checkpoint is damaged, or another model's; on all ranks.
        """
        self._complete_or_warn()
        if not isinstance(checkpoint, Intact):
            checkpoint = verify_checkpoint(as_path(checkpoint), self.transport)
        self._parent = None
        progress = load_checkpoint(checkpoint, model, optimizer)
        if optimizer is not None:
            self._go_on_from(checkpoint, model.tables)
        return progress

    def _go_on_from(self, checkpoint: Intact, tables: Tables) -> None:
        self._restored = None
        step = parse_step(checkpoint.path)
        if step is None or checkpoint.path.parent.resolve() != self.folder.resolve():
            return
        if self._follows and checkpoint.state["format"] > 1:
            follow_changes(tables, self._consumer)
            deltas = len(checkpoint.ancestors)
            self._parent = Parent(step, checkpoint.checksum, deltas, tables)
        self._note_restored(step)

    def _note_restored(self, step: int) -> None:
        self._restored = step
        if self.transport.rank == 0 and (later := self.files.name_later(step)):
            warnings.warn(
                f"going on after step {step}: {later} will be given up, renamed to given-up-*, and "
                "removed when the next checkpoint is saved",
                stacklevel=5,
            )

    def give_up_later(self) -> None:
        """Before the first step after one that was loaded: no attempt may resume from one that
        was saved after that. A collective."""
        step, self._restored = self._restored, None
        if step is not None:
            self._run_on_rank_0(lambda: self.files.give_up_after(step))
