"""The checkpoints of a run: saved and loaded by all ranks together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from freescale.config import TrainConfig
from freescale.embedding.sharded_model import ShardedModel
from freescale.embedding.tables import Tables
from freescale.pipeline.dense.reducer import Reducer
from freescale.train.checkpoint.chain import (
    Intact,
    find_expired,
    last_intact,
    verify_checkpoint,
)
from freescale.train.checkpoint.compression_state import CompressionState
from freescale.train.checkpoint.contents import Contents, collect_contents
from freescale.train.checkpoint.delta import (
    apply_deltas,
    follow_changes,
    is_followed,
    list_parts,
    mark_all_changed,
)
from freescale.train.checkpoint.files import (
    CheckpointFolder,
    parse_step,
    read_state,
    sum_state,
)
from freescale.train.checkpoint.find import find_checkpoint
from freescale.train.checkpoint.model import (
    collect_dense,
    collect_random,
    collect_tables,
    name_parameters,
    pack_extra,
    refuse_other_model,
    restore_extra,
    restore_random,
)
from freescale.train.checkpoint.on_all_ranks import (
    explain_errors,
    run_on_all_ranks,
    run_on_rank_0,
)
from freescale.train.checkpoint.optimizer import refuse_before_it_steps, unpack_optimizer
from freescale.train.checkpoint.packing import Unpacker
from freescale.train.checkpoint.safe_reader import SafeReader
from freescale.train.checkpoint.writing import Beside, coordinate, write_checkpoint
from freescale.transport.api import Transport


@dataclass
class _Parent:
    """The last checkpoint of these tables: the next one may hold what has changed since."""

    step: int
    checksum: int  # of its state.json; rank 0's
    deltas: int  # since the last full one, itself included
    tables: Tables


@dataclass(frozen=True)
class _Saving:
    """A checkpoint that is being written."""

    step: int
    protected: tuple[int, ...]
    parent: _Parent  # of the next one, once this one is in its place


class Checkpoints:
    """The checkpoints in a folder. `check`, `save`, `wait`, `load`, `find` and `last_intact` are
    collectives.

    A folder holds one run. Steps ahead of the one that is saved are refused: they belong to another
    run. Loading an earlier checkpoint with its optimizer leaves the later ones behind: the next
    save removes them.

    Args:
        folder: where the checkpoints are, one folder `step-00000100` each.
        transport: what `connect` returned; `sharded.transport`.
        keep: how many checkpoints stay, beside those that they depend on; a save removes older
            ones.
        full_every: every how many-th checkpoint is a full one. Those between are deltas: of the
            tables they hold the rows that row optimizers have changed since the one before.
        asynchronous: `save` copies what it writes into host memory and returns; writing happens
            beside training. The next save, or `wait`, raises what went wrong.

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
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        if full_every < 1:
            raise ValueError(f"full_every must be at least 1, got {full_every}")
        self.folder = Path(folder)
        self.transport = transport
        self.keep = keep
        self.full_every = full_every
        self.asynchronous = asynchronous
        self._left_behind: set[int] = set()  # rank 0's
        self._parent: _Parent | None = None
        self._saving: _Saving | None = None
        self._finished: Path | None = None  # since `wait` was last called
        self._beside: Beside | None = None

    def __repr__(self) -> str:
        steps = self.steps()
        last = f", last step {steps[-1]}" if steps else ""
        return f"Checkpoints({str(self.folder)!r}, {len(steps)} saved{last}, keep={self.keep})"

    @property
    def files(self) -> CheckpointFolder:
        return CheckpointFolder(self.folder)

    @property
    def _consumer(self) -> str:
        """Under which rows are marked as changed."""
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

    def last_intact(self) -> Intact | None:
        """The last checkpoint, for `load`; if it is damaged, the one before, with a warning."""
        self.wait()
        return last_intact(self.folder, self.transport)

    def find(self, name: str | None) -> Intact:
        """The checkpoint `last`, `best` or of a step; None: the best of a run that keeps it, else
        the last. ValueError if there is none."""
        self.wait()
        return find_checkpoint(self.folder, name, self.transport)

    # ---- save

    def check(
        self, model: ShardedModel, optimizer: torch.optim.Optimizer, step: int | None = 0
    ) -> None:
        """Refuses, before training, what could not be saved later.

        Args:
            model: to be saved.
            optimizer: of its dense parameters.
            step: where training begins. None leaves the folder unchecked.

        Raises:
            ValueError: names what a checkpoint cannot hold, or checkpoints ahead of `step`.
        """
        if step is not None:
            self._run_on_rank_0(lambda: self._refuse_ahead(step))

        def check_names() -> None:
            collect_dense(model.module)
            pack_extra(model.module, {})
            refuse_before_it_steps(optimizer, name_parameters(model))

        run_on_all_ranks(self.transport, check_names)

    def save(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        reducer: Reducer | None = None,
        protected: Collection[int] = (),
    ) -> Path:
        """Writes a checkpoint, or begins to if the folder's are asynchronous. A collective.

        Args:
            model: what `parallelize` returned.
            optimizer: of its dense parameters.
            progress: plain JSON with at least `step` (`pipeline.steps`): where the run stands, for
                instance `pipeline.state_dict()` and the position of the data.
            reducer: `pipeline.reducer`: carries the order of sums, and errors where it compresses,
                from step to step.
            protected: steps whose checkpoints stay beside the last `keep`.

        Returns:
            The checkpoint's folder; an asynchronous one is there after `wait`.

        Raises:
            ValueError: something cannot be saved or written, on all ranks; or the asynchronous
                checkpoint before could not.
            NotFinite: a weight or optimizer state is not finite.
        """
        if not isinstance(progress, Mapping) or "step" not in progress:
            raise ValueError(
                f"progress is {progress!r} and has no 'step': give {{'step': pipeline.steps, ...}}"
            )
        self.wait()
        self._finished = None
        step, transport = int(progress["step"]), self.transport
        self._run_on_rank_0(lambda: self._refuse_ahead(step))
        parent = self._choose_parent(model.tables, step)
        model.tables.settle()
        contents = run_on_all_ranks(
            transport,
            lambda: collect_contents(
                model,
                optimizer,
                progress,
                reducer,
                consumer=self._consumer if parent is not None else None,
                copy=self.asynchronous,
            ),
        )
        if parent is not None:
            contents.state["parent"] = {"step": parent.step, "checksum": parent.checksum}
        # Until this one is in its place, nothing can be said to have changed since it.
        self._parent = None
        if self.full_every > 1:
            follow_changes(model.tables, self._consumer)
        self._saving = _Saving(
            step,
            tuple(protected),
            _Parent(step, 0, parent.deltas + 1 if parent is not None else 0, model.tables),
        )
        if self.asynchronous:
            if self._beside is None:
                self._beside = Beside(transport)
            control = self._beside.transport
            self._beside.start(lambda: self._write(contents, control))
        else:
            self._finish(lambda: self._write(contents, transport))
        return self.path(step)

    def wait(self) -> Path | None:
        """Waits for the checkpoint that is being written. A collective.

        Returns:
            The folder of the checkpoint that was finished since the last call, if there is one.

        Raises:
            ValueError: it could not be written, on all ranks.
            NotFinite: a weight or optimizer state was not finite.
        """
        if self._beside is not None and self._saving is not None:
            self._finish(self._beside.wait)
        finished, self._finished = self._finished, None
        return finished

    def _write(self, contents: Contents, transport: Transport) -> None:
        """On the main thread, or beside it: then nobody else uses what it does."""
        saving = self._saving
        assert saving is not None
        saving.parent.checksum = write_checkpoint(self.files, contents, transport)
        run_on_rank_0(transport, lambda: self._remove_old(saving), str(self.folder))

    def _finish(self, write: Callable[[], None]) -> None:
        """Once the checkpoint is in its place, the next one may hold what changes from here on."""
        saving = self._saving
        assert saving is not None
        try:
            write()
        finally:
            self._saving = None
        self._parent, self._finished = saving.parent, self.path(saving.step)

    def _choose_parent(self, tables: Tables, step: int) -> _Parent | None:
        """The checkpoint whose changes the next one holds; None for a full one. A collective:
        rank 0 sees the folder."""
        parent = self._parent
        if (
            parent is None
            or parent.tables is not tables
            or parent.step >= step
            or parent.deltas + 1 >= self.full_every
            or not is_followed(tables, self._consumer)
        ):
            parent = None
        known = b""
        if parent is not None and self.transport.rank == 0:
            known = b"1" * self._is_in_place(parent)
        return parent if self.transport.gather_bytes(known)[0] else None

    def _is_in_place(self, parent: _Parent) -> bool:
        """Whether the checkpoint is as it was saved, and still the last of the run."""
        steps = [step for step in self.steps() if step not in self._left_behind]
        try:
            found = sum_state(read_state(self.path(parent.step)))
        except (ValueError, OSError):
            return False
        return steps[-1:] == [parent.step] and found == parent.checksum

    def _run_on_rank_0(self, work: Callable[[], object]) -> None:
        run_on_rank_0(self.transport, work, str(self.folder))

    def _refuse_ahead(self, step: int) -> None:
        ahead = [
            self.path(found).name
            for found in self.steps()
            if found > step and found not in self._left_behind
        ]
        if ahead:
            raise ValueError(
                f"{self.folder} holds checkpoints ahead of step {step} ({', '.join(ahead)}), "
                "which this run did not come from: "
                "go on from one of them (load it; --resume), remove them, or use another folder"
            )

    def _remove_old(self, saving: _Saving) -> None:
        """Those left behind, and all but the last `keep`, the protected, and what these depend
        on."""
        expired = find_expired(
            self.files.parents(), saving.step, self.keep, saving.protected, self._left_behind
        )
        self.files.remove(expired)
        self._left_behind.clear()

    # ---- load

    def load(
        self,
        checkpoint: Path | Intact,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer | None = None,
        reducer: Reducer | None = None,
    ) -> dict[str, Any]:
        """Restores tables, dense weights and, with an optimizer, its state and the random state. A
        collective.

        Args:
            checkpoint: a checkpoint's folder, or what `last_intact` returned.
            model: the model, on any number of ranks.
            optimizer: of its dense parameters. Its settings (learning rate, weight decay, ...) stay
                as they are: they may have changed on purpose.
            reducer: `pipeline.reducer`, for errors of compression and the order of sums; where they
                were not saved it begins anew.

        Returns:
            The progress that was saved.

        Raises:
            ValueError: the checkpoint is damaged, or another model's; on all ranks.
        """
        self.wait()
        if not isinstance(checkpoint, Intact):
            checkpoint = verify_checkpoint(Path(checkpoint), self.transport)
        path, state = checkpoint.path, checkpoint.state
        transport, names = self.transport, name_parameters(model)
        if not model.tables.placed:
            model.tables.place(recorded=state["placement"])
        refuse_other_model(path, state, model, optimizer)
        reader = SafeReader(path)
        metadata = run_on_all_ranks(transport, reader.read_metadata)
        unpacker = Unpacker(state, metadata, transport.device)
        dense, tables = collect_dense(model.module), collect_tables(model.tables, transport)
        extra = {
            name: unpacker.unpack(packed) for name, packed in state.get("extra_state", {}).items()
        }
        kept = unpack_optimizer(optimizer, names, state, unpacker) if optimizer is not None else {}
        # Other ranks or devices have other random states; each rank keeps its own.
        same_ranks = state["ranks"] == transport.world and state["device"] == transport.device.type
        random = collect_random(transport) if optimizer is not None and same_ranks else {}
        carried = CompressionState(reducer, names)
        errors = carried.allocate(
            state.get("carried", ()), transport.rank, transport.world, state["ranks"]
        )
        model.tables.discard()
        self._parent = None
        mark_all_changed(model.tables)
        self._load_tensors(checkpoint.base.path, tables)
        run_on_all_ranks(
            transport, lambda: apply_deltas(checkpoint.deltas, list_parts(model.tables))
        )
        self._load_tensors(path, dense | unpacker.tensors | random | errors, reader)
        restore_extra(model.module, extra)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(kept)
        if random:
            restore_random(random, transport)
        carried.restore(same_ranks=state["ranks"] == transport.world)
        if optimizer is not None:
            self._go_on_from(checkpoint, model.tables)
        progress: dict[str, Any] = state["progress"]
        return progress

    def _load_tensors(
        self, path: Path, tensors: dict[str, Tensor], reader: SafeReader | None = None
    ) -> None:
        with explain_errors(f"checkpoint {path} could not be read"):
            load(tensors, storage_reader=reader or SafeReader(path), **coordinate(self.transport))

    def _go_on_from(self, checkpoint: Intact, tables: Tables) -> None:
        step = parse_step(checkpoint.path)
        if step is None or checkpoint.path.resolve().parent != self.folder.resolve():
            return
        if self.full_every > 1 and checkpoint.state["format"] > 1:
            follow_changes(tables, self._consumer)
            self._parent = _Parent(step, checkpoint.checksum, len(checkpoint.ancestors), tables)
        if self.transport.rank == 0:
            self._leave_behind(step)

    def _leave_behind(self, step: int) -> None:
        self._left_behind = {found for found in self.steps() if found > step}
        if self._left_behind:
            names = ", ".join(self.path(found).name for found in sorted(self._left_behind))
            warnings.warn(
                (
                    f"going on from {self.path(step).name}: {names} will be removed when the next "
                    "checkpoint is saved"
                ),
                stacklevel=4,
            )
