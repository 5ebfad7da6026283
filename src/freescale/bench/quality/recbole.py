"""Quality and seconds of a recipe beside RecBole's SASRec with its default settings: on CPUs, one
after the other, on the same events.

Both train on all but the last two events of a user and rank all items for the last; RecBole keeps
the weights that are best for the last but one. It ranks the items of a history like any other, and
so it is done here.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freescale.bench.common.repository import require_repository
from freescale.bench.common.results import Destination, Row, claim, write
from freescale.bench.quality.peer import write_interactions

if TYPE_CHECKING:
    from freescale.bench.quality.bench import Plan

EPOCHS = 20  # of RecBole's run
_SHARE = 1 / 3  # of its time
_SECONDS = 4 * 3600.0  # that a run may take
_SEED = "freescale.bench.quality.seed"
_METRICS = {"hr@10": "hit@10", "ndcg@10": "ndcg@10"}  # here, and by RecBole's names


def set_up_recbole(root: Path) -> str:
    """The interpreter of .venv-recbole, made or brought up to date first.

    Raises:
        ValueError: RecBole cannot be set up.
    """
    print("setting RecBole up in .venv-recbole (the first time takes a minute or two)", flush=True)
    if subprocess.run(["bash", str(root / "benchmarks/recbole/setup.sh")], check=False).returncode:
        raise ValueError("RecBole could not be set up")
    return str(root / ".venv-recbole" / "bin" / "python")


def bench_recbole(plan: Plan, interpreter: str, to: Destination) -> None:
    """Trains the recipe's first seed, then RecBole's SASRec.

    Args:
        interpreter: of an environment with RecBole; empty sets one up.

    Raises:
        ValueError: a run fails.
    """
    from freescale.train.build import prepare_data

    root = require_repository()
    program = interpreter or set_up_recbole(root)
    seed = plan.list_seeds()[0]
    histories = prepare_data(seed.config)
    atomic = plan.folder / "recbole" / "events" / "events.inter"
    if not atomic.exists():
        write_atomic(histories, atomic)
    task = Path(seed.folder) / "task.json"
    task.parent.mkdir(parents=True, exist_ok=True)
    seed.write(task)
    own: Row = {"arm": plan.arm, **_train([sys.executable, "-m", _SEED, str(task)])}
    found = seed.find_result()
    assert found is not None
    own |= {"seconds": found["seconds"], "epochs": seed.config.train.epochs}
    own |= {name: found["quality"]["model"][name] for name in _METRICS}
    runner = str(root / "benchmarks" / "recbole" / "run.py")
    folder = atomic.parents[1].absolute()
    words = [str(Path(program).absolute()), runner, str(folder), atomic.stem, str(EPOCHS), "0"]
    print(
        f"RecBole's {EPOCHS} epochs begin; TensorBoard shows each: {folder / 'log_tensorboard'}",
        flush=True,
    )
    theirs = _train(words, folder)  # RecBole writes logs where it runs
    said = json.loads(theirs.pop("printed").splitlines()[-1])
    own.pop("printed")
    peer: Row = {"arm": "RecBole's SASRec", **theirs, **said}
    peer |= {name: said["test"][other] for name, other in _METRICS.items()}
    if own["seconds"] is None:
        raise ValueError(f"{seed.folder} was continued, so its time says nothing: remove it")
    _write(plan, [own, peer], to)


def write_atomic(histories: Path, path: Path) -> None:
    """The events of a histories file as one of RecBole's atomic files."""
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    events = path.with_suffix(".parquet")
    write_interactions(histories, events)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(b"user_id:token\titem_id:token\ttimestamp:float\n")
        options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        csv.write_csv(pq.read_table(events), file, options)
    temporary.replace(path)
    events.unlink()


def _train(command: list[str], folder: Path | None = None) -> dict[str, Any]:
    """Runs a program: its processor seconds, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # every core, whatever this process was told
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
        env=environment,
        cwd=folder,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ValueError(f"{' '.join(command[:3])} failed: {' '.join(last)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor_seconds": used, "printed": done.stdout}


def _write(plan: Plan, rows: list[Row], to: Destination) -> None:
    own, peer = rows
    about = f"{plan.arm} on {plan.name}"
    claims = [
        claim(
            f"{about}: {name} over that of RecBole's SASRec after {EPOCHS} epochs",
            1.0,
            own[name] / peer[name],
            "x",
            at_least=True,
        )
        for name in _METRICS
    ]
    share = own["seconds"] / peer["seconds"]
    text = f"{about}: seconds of training over those of RecBole's SASRec"
    claims.append(claim(text, _SHARE, share, "x", at_least=False))
    command = f"{plan.describe_command()} --recbole"
    name = f"{plan.arm}-{plan.name}-recbole-cpu"
    write("quality", name, command, rows, claims, to=to, method=(__doc__ or "").strip())
