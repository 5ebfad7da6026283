"""The checkpoints of a run: saved and loaded by all ranks together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from freescale.config import TrainConfig
from freescale.embedding.sharded_model import ShardedModel
from freescale.pipeline.dense.reducer import Reducer
from freescale.train.checkpoint.compression_state import CompressionState
from freescale.train.checkpoint.files import (
    FORMAT,
    CheckpointFolder,
    Intact,
    compute_checksum,
    last_intact,
    parse_step,
    verify_checkpoint,
    write_state,
)
from freescale.train.checkpoint.find import find_checkpoint
from freescale.train.checkpoint.finite_check import NotFinite, find_not_finite
from freescale.train.checkpoint.model import (
    collect_dense,
    collect_random,
    collect_tables,
    describe_model,
    find_untrained,
    name_parameters,
    pack_extra,
    refuse_other_model,
    restore_extra,
    restore_random,
)
from freescale.train.checkpoint.on_all_ranks import (
    CheckpointWriter,
    describe_error,
    explain_errors,
    run_on_all_ranks,
)
from freescale.train.checkpoint.optimizer import (
    pack_optimizer,
    refuse_before_it_steps,
    unpack_optimizer,
)
from freescale.train.checkpoint.packing import Unpacker
from freescale.train.checkpoint.safe_reader import SafeReader
from freescale.transport.api import Transport
from freescale.transport.process_group import ProcessGroupTransport


class Checkpoints:
    """The checkpoints in a folder. `check`, `save`, `load`, `find` and `last_intact` are
    collectives.

    A folder holds one run. Steps ahead of the one that is saved are refused: they belong to another
    run. Loading an earlier checkpoint with its optimizer leaves the later ones behind: the next
    save removes them.

    Args:
        folder: where the checkpoints are, one folder `step-00000100` each.
        transport: what `connect` returned; `sharded.transport`.
        keep: how many checkpoints stay; a save removes older ones.

    Raises:
        ValueError: `keep` is less than 1.
    """

    def __init__(
        self, folder: str | Path, transport: Transport, keep: int = TrainConfig.keep_checkpoints
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.transport = transport
        self.keep = keep
        self._left_behind: set[int] = set()  # rank 0's

    def __repr__(self) -> str:
        steps = self.steps()
        last = f", last step {steps[-1]}" if steps else ""
        return f"Checkpoints({str(self.folder)!r}, {len(steps)} saved{last}, keep={self.keep})"

    @property
    def files(self) -> CheckpointFolder:
        return CheckpointFolder(self.folder)

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
        return last_intact(self.folder, self.transport)

    def find(self, name: str | None) -> Intact:
        """The checkpoint `last`, `best` or of a step; None: the best of a run that keeps it, else
        the last. ValueError if there is none."""
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
        """Writes a checkpoint. A collective.

        Args:
            model: what `parallelize` returned.
            optimizer: of its dense parameters.
            progress: plain JSON with at least `step` (`pipeline.steps`): where the run stands, for
                instance `pipeline.state_dict()` and the position of the data.
            reducer: `pipeline.reducer`: carries the order of sums, and errors where it compresses,
                from step to step.
            protected: steps whose checkpoints stay beside the last `keep`.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: something cannot be saved or written, on all ranks.
            NotFinite: a weight or optimizer state is not finite.
        """
        if not isinstance(progress, Mapping) or "step" not in progress:
            raise ValueError(
                f"progress is {progress!r} and has no 'step': give {{'step': pipeline.steps, ...}}"
            )
        step = int(progress["step"])
        self._run_on_rank_0(lambda: self._refuse_ahead(step))
        model.tables.settle()
        tensors, state = run_on_all_ranks(
            self.transport, lambda: self._contents(model, optimizer, progress, reducer)
        )
        run_on_all_ranks(
            self.transport,
            lambda: self._refuse_diverged(step, tensors, find_untrained(model.module)),
            NotFinite,
        )
        failure = f"checkpoint {self.path(step)} could not be written"
        try:
            self._run_on_rank_0(lambda: self.files.begin(step), failure)
            self._write(self.files.writing_path(step), tensors, state, failure)
            self._run_on_rank_0(lambda: self.files.finish(step), failure)
        except ValueError:  # all ranks are here, none writes any more
            if self.transport.rank == 0:
                with suppress(OSError):  # the next save tries again
                    self.files.clear()
            raise
        self._run_on_rank_0(lambda: self._remove_old(step, protected))
        return self.path(step)

    def _contents(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        progress: Mapping[str, Any],
        reducer: Reducer | None,
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything as named tensors, and the rest as JSON. Makes nothing and changes nothing."""
        try:
            json.dumps(dict(progress))
        except TypeError as error:
            raise ValueError(f"progress must be plain JSON: {error}") from None
        transport, names = self.transport, name_parameters(model)
        tensors = collect_dense(model.module) | collect_tables(model.tables, transport)
        beside: dict[str, Tensor] = {}
        extra = pack_extra(model.module, beside)
        own, shared = pack_optimizer(optimizer, names, beside)
        carried = CompressionState(reducer, names)
        state = {"format": FORMAT} | describe_model(model, optimizer) | {"progress": dict(progress)}
        state |= {"ranks": transport.world, "device": transport.device.type}
        state |= {"optimizer_state": own, "optimizer_shared": shared, "extra_state": extra}
        if transport.device.type != "cpu":
            state["on_host"] = [
                name for name, value in beside.items() if value.device.type == "cpu"
            ]
        state |= {"carried": carried.names} if carried.names else {}
        return tensors | beside | carried.tensors(transport.rank) | collect_random(transport), state

    def _write(
        self, folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], failure: str
    ) -> None:
        rank = self.transport.rank
        with explain_errors(failure):
            save(
                tensors,
                storage_writer=CheckpointWriter(folder, overwrite=True),
                **self._coordination(),
            )

        def sum_files() -> dict[str, list[int]]:
            mine = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
            return {path.name: compute_checksum(path) for path in mine}

        said = run_on_all_ranks(self.transport, sum_files)
        files = [
            json.loads(part) for part in self.transport.gather_bytes(json.dumps(said).encode())
        ]
        state["files"] = {name: sum_of for part in files for name, sum_of in part.items()}
        self._run_on_rank_0(lambda: write_state(folder, state), failure)

    def _run_on_rank_0(self, work: Callable[[], object], failure: str | None = None) -> None:
        """Rank 0's work; if it fails, all ranks say so."""

        def done() -> None:
            try:
                if self.transport.rank == 0:
                    work()
            except OSError as error:
                raise ValueError(f"{failure or self.folder}: {describe_error(error)}") from error

        run_on_all_ranks(self.transport, done)

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

    def _refuse_diverged(
        self, step: int, tensors: Mapping[str, Tensor], untrained: Collection[str]
    ) -> None:
        if name := find_not_finite(tensors, untrained):
            raise NotFinite(
                f"{name} is not finite at step {step}, which is therefore not saved: "
                "the checkpoints before it stay"
            )

    def _remove_old(self, step: int, protected: Collection[int]) -> None:
        """Those left behind, and all but the last `keep` and the protected; never the one just
        saved."""
        others = [found for found in self.steps() if found != step]
        old = [found for found in others if found not in self._left_behind]
        expired = old[: max(0, len(old) - self.keep + 1)]
        self.files.remove(
            [found for found in others if found in self._left_behind]
            + [found for found in expired if found not in protected]
        )
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
        tensors = collect_dense(model.module) | collect_tables(model.tables, transport)
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
        with explain_errors(f"checkpoint {path} could not be read"):
            load(
                tensors | unpacker.tensors | random | errors,
                storage_reader=reader,
                **self._coordination(),
            )
        restore_extra(model.module, extra)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(kept)
        if random:
            restore_random(random, transport)
        carried.restore(same_ranks=state["ranks"] == transport.world)
        if optimizer is not None and transport.rank == 0:
            self._leave_behind(path)
        progress: dict[str, Any] = state["progress"]
        return progress

    def _leave_behind(self, path: Path) -> None:
        step = parse_step(path)
        if step is None or path.resolve().parent != self.folder.resolve():
            return
        self._left_behind = {found for found in self.steps() if found > step}
        if self._left_behind:
            names = ", ".join(self.path(found).name for found in sorted(self._left_behind))
            warnings.warn(
                (
                    f"going on from {path.name}: {names} will be removed when the next "
                    "checkpoint is saved"
                ),
                stacklevel=3,
            )

    def _coordination(self) -> dict[str, Any]:
        if isinstance(self.transport, ProcessGroupTransport):
            return {"process_group": self.transport.control}
        return {"no_dist": True}
