"""The moments of a run at which a fault can happen: every stage of a step, of a checkpoint, of a
restore. Each is a function of the library, before or after its call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

STEP, CHECKPOINT, SNAPSHOT = "step", "checkpoint", "snapshot"
RESTORE, MEETING, PREPARE = "restore", "meeting", "prepare"


@dataclass(frozen=True)
class Moment:
    """`function`: "module:attribute" or "module:Class.method", under freescale, where it is called
    from. `rank_0`: the other ranks do not call it. `after`: at the end of the call."""

    group: str
    name: str
    function: str
    rank_0: bool = False
    after: bool = False


_STAGED, _SCHEDULE = "pipeline.staged:Staged", "pipeline.schedule:Schedule"
_STAGES = "pipeline.row_stages:RowStages"
_NEXT = "pipeline.next_batch:BatchPreparation"
_STATE = "train.state"
_FILES = f"{_STATE}.disk:CheckpointFolder"
_WRITER = "train.torch_files.tensor_writer"

MOMENTS = (
    Moment(STEP, "take batch", f"{_NEXT}._take"),
    Moment(STEP, "agree", f"{_NEXT}._agree"),
    Moment(STEP, "send samples", f"{_NEXT}._send_samples"),
    Moment(STEP, "begin input", f"{_STAGED}._begin_input"),
    Moment(STEP, "request ids", f"{_STAGES}.request_ids"),
    Moment(STEP, "compare ids", f"{_STAGES}.compare"),
    Moment(STEP, "push deferred gradients", f"{_STAGES}.push_deferred_gradients"),
    Moment(STEP, "allocate rows", f"{_STAGES}.allocate_rows"),
    Moment(STEP, "pull early rows", f"{_STAGES}.pull_early_rows"),
    Moment(STEP, "push urgent gradients", f"{_STAGES}.push_urgent_gradients"),
    Moment(STEP, "pull late rows", f"{_STAGES}.pull_late_rows"),
    Moment(STEP, "late rows are there", f"{_STAGES}.pull_late_rows", after=True),
    Moment(STEP, "wait for rows", f"{_STAGED}._await_rows"),
    Moment(STEP, "forward", f"{_SCHEDULE}._forward"),
    Moment(STEP, "backward is over", f"{_SCHEDULE}._compute", after=True),
    Moment(STEP, "sum dense gradients", "pipeline.dense.buckets:GradientBuckets.reduce"),
    Moment(STEP, "dense optimizer", f"{_SCHEDULE}._update_dense"),
    Moment(STEP, "step is over", f"{_SCHEDULE}._make_result", after=True),
    Moment(STEP, "log", "train.training_loop:TrainingLoop._log"),
    Moment(CHECKPOINT, "begin to save", f"{_STATE}.checkpoints:Checkpoints.save"),
    Moment(CHECKPOINT, "copied", f"{_STATE}.checkpoints:Checkpoints.save", after=True),
    Moment(CHECKPOINT, "make folder", f"{_FILES}.begin", rank_0=True),
    Moment(CHECKPOINT, "write tensors", f"{_WRITER}:TensorWriter.write"),
    Moment(CHECKPOINT, "write file", f"{_WRITER}:FileSystemWriter.write_data"),
    Moment(CHECKPOINT, "tensors are written", f"{_WRITER}:TensorWriter.write", after=True),
    Moment(CHECKPOINT, "write state", f"{_STATE}.writing:write_state", rank_0=True),
    Moment(CHECKPOINT, "rename", f"{_FILES}.finish", rank_0=True),
    Moment(CHECKPOINT, "sync", f"{_STATE}.disk:sync", rank_0=True),
    Moment(CHECKPOINT, "synced", f"{_STATE}.disk:sync", rank_0=True, after=True),
    Moment(CHECKPOINT, "renamed", f"{_FILES}.finish", rank_0=True, after=True),
    Moment(CHECKPOINT, "remove old", f"{_FILES}.remove", rank_0=True),
    Moment(SNAPSHOT, "take snapshot", f"{_STATE}.snapshots:Snapshots.take_if_due"),
    Moment(SNAPSHOT, "write segment", f"{_STATE}.memory:StateFile.seal"),
    Moment(SNAPSHOT, "segment is written", f"{_STATE}.memory:StateFile.seal", after=True),
    Moment(SNAPSHOT, "keep segment", f"{_STATE}.snapshots:Snapshots._put"),
    Moment(SNAPSHOT, "complete snapshot", f"{_STATE}.snapshots:Snapshots._complete"),
    Moment(SNAPSHOT, "snapshot is complete", f"{_STATE}.snapshots:Snapshots._complete", after=True),
    Moment(RESTORE, "claim folder", "train.run_folder:RunFolder._inspect", rank_0=True),
    Moment(RESTORE, "find checkpoint", f"{_STATE}.checkpoints:find_checkpoint"),
    Moment(RESTORE, "verify files", f"{_STATE}.intact:_compare_all"),
    Moment(RESTORE, "load tensors", "train.torch_files.safe_reader:SafeReader.fill"),
    Moment(
        RESTORE, "tensors are loaded", "train.torch_files.safe_reader:SafeReader.fill", after=True
    ),
    Moment(RESTORE, "cut logs", "train.resume:truncate_logs", rank_0=True),
    Moment(RESTORE, "restored", "train.trainer:begin_or_resume", after=True),
    Moment(RESTORE, "open folder", "train.run_folder:RunFolder.open"),
    Moment(RESTORE, "log restart", "train.run_folder:RunFolder.log_restarts"),
    Moment(RESTORE, "restart is logged", "train.run_folder:RunFolder.log_restarts", after=True),
    Moment(MEETING, "connect", "train.commands:connect"),
    Moment(MEETING, "make groups", "transport.connect:_join"),
    Moment(MEETING, "connected", "train.commands:connect", after=True),
    Moment(PREPARE, "build histories", "data.ingest.prepare:build_histories"),
    Moment(PREPARE, "write histories", "data.ingest.history_builder:HistoriesWriter.write"),
    Moment(PREPARE, "histories are written", "data.ingest.prepare:build_histories", after=True),
)


def list_moments(group: str) -> list[Moment]:
    return [moment for moment in MOMENTS if moment.group == group]


def watch_moments(visit: Callable[[str], None]) -> None:
    """Makes this process call `visit` with the name of each moment that it reaches, in whichever
    thread that is."""
    for moment in MOMENTS:
        watch(moment.function, functools.partial(_visit, visit, moment.name), after=moment.after)


def _visit(visit: Callable[[str], None], name: str, *_: object) -> None:
    visit(name)


def watch(function: str, call: Callable[..., None], *, after: bool = False) -> None:
    """Makes this process call `call` with the arguments of `function` before each call of it, or
    with its result and its arguments after it."""
    module, _, path = function.partition(":")
    owner: Any = import_module(f"freescale.{module}")
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*arguments: Any, **named: Any) -> Any:
        if not after:
            call(*arguments)
        result = original(*arguments, **named)
        if after:
            call(result, *arguments)
        return result

    setattr(owner, name, watched)
