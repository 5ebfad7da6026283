"""A run from the inside of one rank: joins the others, trains or evaluates, shows the result on rank 0."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from freescale.config import RunConfig
from freescale.train.checkpoint import Checkpoints
from freescale.train.trainer import Trainer, build_parallel, evaluate, histories, plain_json
from freescale.transport.api import Transport
from freescale.transport.connect import connect


def _agreed_folder(folder: Path, resume: bool, transport: Transport) -> Path:
    """Rank 0's folder on all ranks: a default name has the time in it, which differs. A run that is there is not overwritten."""
    mine = json.dumps([str(folder), not resume and (folder / "config.json").exists()]).encode()
    name, taken = json.loads(transport.gather_bytes(mine)[0])
    if taken:
        raise ValueError(f"{name} already holds a run: name another folder, or pass --resume to go on with it")
    return Path(name)


def run_training(config: RunConfig, folder: Path, resume: bool, prepared: Callable[[], Path]) -> None:
    path = prepared()  # before the ranks meet: it may take long, and its errors are the same on every rank
    transport = connect(config.train.device, config.train.timeout, config.train.transport)
    folder = _agreed_folder(folder, resume, transport)
    watcher = None
    if transport.rank == 0:
        from freescale.observe.console import RunView

        watcher = RunView(folder, config.train.tensorboard)
    results = Trainer(config, path, folder, transport, watcher, resume).train()
    if transport.rank == 0:
        _show(results, folder)
    transport.close()


def _show(results: dict, folder: Path) -> None:
    from rich.console import Console

    from freescale.observe.console import print_ledger, print_quality

    console = Console()
    if results.get("test"):
        print_quality(console, results["test"])
    print_ledger(console, results["ledger"])
    if "loss" in results:
        quality = results.get("test", {}).get("model", {})
        hit = f"  HR@10 {quality['hr@10']:.4f}" if "hr@10" in quality else ""
        console.print(f"loss {results['loss']:.4f}{hit}", highlight=False, soft_wrap=True)
    console.print(
        f"everything is in {folder}: config.json, metrics.jsonl, ledger.json, trace.json.gz, checkpoints",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"where the time went: freescale report {shlex.quote(str(folder))}", highlight=False, soft_wrap=True)


def run_evaluation(config: RunConfig, folder: Path, part: str, prepared: Callable[[], Path]) -> None:
    path = prepared()
    transport = connect(config.train.device, config.train.timeout, config.train.transport)
    checkpoints = Checkpoints(folder / "checkpoints", transport)
    found = checkpoints.last_intact()
    if found is None:
        raise ValueError(f"{folder} holds no checkpoint")
    parallel = build_parallel(config, histories(config, path, transport), transport)
    progress = checkpoints.load(found, parallel)
    quality = evaluate(config, parallel, path, part, baseline=True)
    if transport.rank == 0:
        from rich.console import Console

        from freescale.observe.console import print_quality

        console = Console()
        console.print(f"{found.path}, step {progress['step']}, {part} part", highlight=False, soft_wrap=True)
        print_quality(console, quality, part)
        result = {"checkpoint": found.path.name, "part": part, "torch": torch.__version__, "quality": quality}
        (folder / f"eval-{part}.json").write_text(plain_json(result) + "\n", encoding="utf-8")
    transport.close()
