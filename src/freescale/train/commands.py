"""The commands train and eval in each rank: connect to the others, train or evaluate, print the
results on rank 0."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from freescale.config import RunConfig
from freescale.config.metrics import UNSEEN
from freescale.data.histories import HistoriesFile
from freescale.data.ingest.ids import VOCABULARY, check_vocabulary
from freescale.data.store.event_store import EventStore
from freescale.data.stream.stream import STORE
from freescale.launch.attempts import AUTO
from freescale.launch.signals import StopSignals, choose_status
from freescale.stores.runs import find_checkpoints, find_store, upload_run
from freescale.train.build import (
    build_model,
    evaluate_part,
    find_run_vocabulary,
    load_features,
    load_histories,
)
from freescale.train.follow import find_evaluated
from freescale.train.metrics_log import to_json
from freescale.train.progress import ConsoleProgress
from freescale.train.sample_ranks import SampleRanks, write_ranks
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.intact import Intact
from freescale.train.trainer import Trainer
from freescale.transport.api import Transport
from freescale.transport.connect import connect
from freescale.worker_server import WorkerServer


def run_training(
    config: RunConfig,
    folder: Path | None,
    resume: str | None,
    prepare: Callable[[], Path],
    worker_server: WorkerServer | None = None,
) -> int:
    """Trains as one of the ranks, and shows the run on rank 0's terminal.

    Args:
        config: the run's settings.
        folder: the run's folder; None makes a new one.
        resume: the checkpoint to continue from, or `auto`; None for a new run.
        prepare: returns the histories file.
        worker_server: a server for data workers, if the run has any.

    Returns:
        The exit status: 0, or after a signal that of `choose_status`.
    """
    # before the ranks connect: it may take long, and its errors are the same on every rank
    path = None if config.data.follow else prepare()
    transport = connect(config.train.device, config.train.timeout, config.train.transport)
    if resume == AUTO:  # a rank on another machine may not see the folder's content yet
        config = RunConfig.from_json(transport.gather_bytes(config.to_json().encode())[0].decode())
    callbacks = [ConsoleProgress()] if transport.rank == 0 else []
    trainer = Trainer(
        config,
        folder,
        resume=resume if resume is not None else False,
        callbacks=callbacks,
        histories=path,
        transport=transport,
        worker_server=worker_server,
    )
    with StopSignals(trainer.stop, transport.rank) as signals:
        results = trainer.train(signals)
        if transport.rank == 0:
            stopped = _describe_stop(trainer) if results["stopped"] else ""
            _show(results, trainer, stopped)
        if results["stopped"]:
            # a launcher ends the others when the first rank ends: wait until all are done
            transport.gather_bytes(b"")
        transport.close()
    return choose_status(results["stopped"])


def _describe_stop(trainer: Trainer) -> str:
    """Where the run stopped, and how to continue."""
    step, latest = trainer.step, trainer.checkpoints.latest()
    if trainer.is_complete:
        evaluate = f"; the test part is left: freescale eval {shlex.quote(str(trainer.folder))}"
        rest = evaluate if trainer.config.data.split != "none" else ""
        return f"stopped after the last step, {step}: the run is complete and saved{rest}"
    if latest is None:
        return (
            "stopped before the first step: nothing to save; start it again with the same command"
        )
    command = resume_command(trainer.folder, os.environ)
    return f"stopped after step {step}, saved in {latest}; go on with: {command}"


def resume_command(folder: Path, environment: Mapping[str, str]) -> str:
    """The command that resumes a run as it was started: by torchrun, `--nproc`, or as one
    process."""
    arguments = f"train --folder {shlex.quote(str(folder))} --resume"
    ranks, local = (int(environment.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "TORCHELASTIC_RUN_ID" in environment:
        machines = f"--nnodes {ranks // local} ... " if ranks > local else ""
        return f"torchrun {machines}--nproc-per-node {local} -m freescale {arguments}"
    return f"freescale {arguments}" + (f" --nproc {ranks}" if ranks > 1 else "")


def _describe_best(trainer: Trainer) -> list[str]:
    """Describes the best evaluation, its checkpoint, and whether --patience ended training."""
    best = trainer.best
    if best is None:
        return []
    if best.step is None:
        return [f"no best one: {best.metric} was not defined in any evaluation"]
    where = f", {trainer.checkpoints.path(best.step)}" if best.kept else ""
    line = f"best on the validation part: step {best.step}, {best.metric} {best.value:.4f}{where}"
    if not best.exhausted:
        return [line]
    return [f"ended early, after {best.since} evaluations without a better one (--patience)", line]


def _show(results: dict[str, Any], trainer: Trainer, stopped: str) -> None:
    from rich.console import Console

    from freescale.report.console import print_ledger, print_quality

    console, folder, lines = Console(), trainer.folder, []
    if results.get("test"):
        print_quality(console, results["test"])
    if "ledger" in results:
        print_ledger(console, results["ledger"])
    else:
        lines += [*trainer.notes, f"{folder} is complete: nothing is left to train"]
    if "loss" in results:
        quality = results.get("test", {}).get("model", {})
        hit = ""
        if "hr@10" in quality:
            unseen = quality[f"hr@10{UNSEEN}"]
            hit = f"  HR@10 {quality['hr@10']:.4f}, without the history's items {unseen:.4f}"
        lines.append(f"last loss {results['loss']:.4f}{hit}")
    lines += _describe_best(trainer)
    lines += [
        f"everything is in {find_store(folder) or folder}: config.json, metrics.jsonl, "
        "ledger.json, trace.json.gz, checkpoints",
        f"see where the time went: freescale report {shlex.quote(str(folder))}",
    ]
    if results.get("test") and trainer.data.time is None:
        lines.append(
            "held-out events were not trained on: for production, train again with --split none"
        )
    for line in [*lines, *([stopped] if stopped else [])]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def evaluate_checkpoint(
    config: RunConfig,
    folder: Path,
    part: str,
    path: Path,
    transport: Transport,
    checkpoint: str | None = None,
    keep: SampleRanks | None = None,
) -> tuple[Intact, dict[str, Any], dict[str, dict[str, float]]]:
    """Evaluates a checkpoint of a run. A collective.

    Args:
        config: the run's settings.
        folder: the run's folder.
        part: `validation` or `test`.
        path: the histories file.
        transport: joins the ranks.
        checkpoint: a name that `Checkpoints.find` understands.
        keep: receives the target's rank for each sample (retrieval).

    Returns:
        The checkpoint, its progress, and the metrics of model and popularity baseline.
    """
    follows = config.data.follow is not None
    if keep is not None and (config.model.task != "retrieval" or follows):
        kind = "with --follow" if follows else "of --task ranking"
        raise ValueError(f"--ranks is for retrieval in order of users: {folder} is a run {kind}")
    checkpoints = Checkpoints(find_checkpoints(folder), transport)
    found = checkpoints.find(checkpoint)
    data = load_histories(config, path, transport, trained=folder)
    model = build_model(config, data, transport)
    progress = checkpoints.load(found, model)
    window = find_evaluated(folder, path, progress) if follows else None
    quality = evaluate_part(config, model, path, part, not follows, keep, folder, window)
    return found, progress, quality


def run_evaluation(
    config: RunConfig,
    folder: Path,
    part: str,
    prepare: Callable[[], Path],
    checkpoint: str | None = None,
    ranks: Path | None = None,
    data: str | None = None,
) -> None:
    """Evaluates a checkpoint with `evaluate_checkpoint`, on the histories file of `prepare`. Writes
    eval-PART.json into the run's folder, or eval-PART-DIGEST.json for `data` other than the run's.
    `ranks`: CSV file for the rank of every user's target (retrieval)."""
    path, hashed = prepare(), "item" in config.dynamic_tables
    vocabulary = find_run_vocabulary(path, load_features(config, path, folder))
    follows = config.data.follow is not None
    if (folder / VOCABULARY).is_file() and not follows:
        columns = ["action"] if hashed else ["item_id", "action"]
        check_vocabulary(vocabulary, folder / VOCABULARY, columns)
    transport = connect(config.train.device, config.train.timeout, config.train.transport)
    keep = SampleRanks() if ranks is not None else None
    found, progress, quality = evaluate_checkpoint(
        config, folder, part, path, transport, checkpoint, keep
    )
    if transport.rank == 0:
        from rich.console import Console

        from freescale.report.console import print_quality

        fingerprint = HistoriesFile(path, config.data.num_items, hashed).fingerprint
        own = fingerprint == progress["data"]["fingerprint"]
        if follows:
            fingerprint = EventStore(path.parent.parent / STORE).fingerprint
            own = path.is_relative_to(folder)
        written = folder / (f"eval-{part}.json" if own else f"eval-{part}-{fingerprint[:8]}.json")
        result = {
            "checkpoint": found.path.name,
            "data": data or config.data.data,
            "part": part,
            "torch": torch.__version__,
            "quality": quality,
        }
        written.write_text(to_json(result) + "\n", encoding="utf-8")
        upload_run(folder)
        console = Console()
        where = f"{found.path}, step {progress['step']}, {part} part"
        console.print(where, highlight=False, soft_wrap=True)
        print_quality(console, quality, part)
        lines = [f"all metrics are in {written}"]
        if ranks is not None and keep is not None:
            write_ranks(ranks, path, keep, vocabulary)
            lines.append(f"the rank of every user's target is in {ranks}")
            if hashed and not config.data.vocabulary:
                lines.append(
                    "item ids that are strings are listed as their hashes: --no-vocabulary kept no "
                    "texts"
                )
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)
    transport.close()
