"""Quality and seconds of a recipe against RecBole's SASRec with its default settings, on CPUs, one
after the other, on the same events.

Both train on all but the last two events of a user and rank all items for the last. RecBole keeps
the weights that are best for the event before. Items of a user's history are ranked like any other.
RecBole reads only items; the recipe also reads ratings, if any, and HSTU timestamps. The recipe's
figures are means over seeds, RecBole's are of one run. RecBole's row may come from an earlier
result (`from`) with the same data, on a machine with the same cores.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freescale.ledger.collector import describe_machine
from freescale_bench.common.repository import require_repository
from freescale_bench.common.results import (
    Destination,
    Result,
    Row,
    at_least,
    at_most,
    read_result,
    write,
)
from freescale_bench.quality.peer import write_interactions

if TYPE_CHECKING:
    from freescale_bench.quality.bench import Plan
    from freescale_bench.quality.seed import Seed

PEER = "RecBole's SASRec"
EPOCHS = 20  # of RecBole's run
_SHARE = 1 / 3  # target: of RecBole's time
_SECONDS = 4 * 3600.0  # limit of a run
_SEED = "freescale_bench.quality.seed"
_METRICS = {"hr@10": "hit@10", "ndcg@10": "ndcg@10"}  # by our names: RecBole's
_SPEED = ("cpu", "architecture", "cores")  # properties of a machine that affect its speed


def set_up_recbole(root: Path) -> str:
    """Creates or updates .venv-recbole. Returns its interpreter.

    Raises:
        ValueError: RecBole cannot be set up.
    """
    print("setting RecBole up in .venv-recbole (the first time takes a minute or two)", flush=True)
    if subprocess.run(
        ["bash", str(root / "benchmarks/peers/recbole/setup.sh")], check=False
    ).returncode:
        raise ValueError("RecBole could not be set up")
    return str(root / ".venv-recbole" / "bin" / "python")


def bench_recbole(plan: Plan, interpreter: str, to: Destination) -> None:
    """Trains the recipe's seeds, then RecBole's SASRec, unless `plan.peer_figures` is an earlier
    result with it.

    Args:
        interpreter: of an environment with RecBole; empty: sets one up.

    Raises:
        ValueError: a run fails, or the earlier result is from another machine or other data.
    """
    from freescale.train.build import prepare_data

    earlier = None
    if plan.peer_figures is not None:
        earlier = read_earlier(plan.peer_figures, describe_machine(), plan.describe_data())
    root = require_repository()
    program = "" if earlier else interpreter or set_up_recbole(root)
    histories = prepare_data(plan.list_seeds()[0].config)
    own = _train_recipe(plan)
    peer = earlier or _train_peer(plan, histories, root, program)
    _write(plan, [own, peer], to)


def read_earlier(path: Path, machine: Mapping[str, Any], dataset: Mapping[str, str]) -> Row:
    """Reads RecBole's row of an earlier result, and adds its source.

    Args:
        path: of the result.
        machine: the machine that trains the recipe.
        dataset: the data of the recipe. Results without this entry are accepted.

    Raises:
        ValueError: the file has no such row, or is from another machine or other data.
    """
    result: Result = read_result(path)
    found = [row for row in result.get("rows", []) if row.get("arm") == PEER]
    if not found:
        raise ValueError(f"{path} is no result of `bench quality --recbole`: no row of {PEER}")
    for name in _SPEED:
        if result["machine"][name] != machine[name]:
            raise ValueError(
                f"{path} was measured on another machine, {name} {result['machine'][name]} where "
                f"this has {machine[name]}: leave --peer-figures out to train RecBole here"
            )
    if result.get("dataset", dataset) != dataset:
        raise ValueError(f"{path} is of other data, {result['dataset']}, not {dataset}")
    source = {"file": path.name, "commit": result["commit"], "date": result["date"]}
    return {"from": source, **found[0]}  # its own source, if any, takes precedence


def _train_recipe(plan: Plan) -> Row:
    """Trains the seeds one after the other. Returns their means."""
    seeds = [_train_seed(seed) for seed in plan.list_seeds()]
    means = {name: sum(one[name] for one in seeds) / len(seeds) for name in seeds[0]}
    epochs = plan.list_seeds()[0].config.train.epochs
    return {"arm": plan.arm, **means, "epochs": epochs, "seeds": seeds}


def _train_seed(seed: Seed) -> dict[str, float]:
    task = Path(seed.folder) / "task.json"
    task.parent.mkdir(parents=True, exist_ok=True)
    seed.write(task)
    used = _train([sys.executable, "-m", _SEED, str(task)])["processor_seconds"]
    found = seed.find_result()
    assert found is not None
    if found["seconds"] is None:
        raise ValueError(f"{seed.folder} was resumed, so its time means nothing: remove it")
    quality = {name: found["quality"]["model"][name] for name in _METRICS}
    return {"seconds": found["seconds"], "processor_seconds": used, **quality}


def _train_peer(plan: Plan, histories: Path, root: Path, program: str) -> Row:
    atomic = plan.folder / "recbole" / "events" / "events.inter"
    if not atomic.exists():
        write_atomic(histories, atomic)
    runner = str(root / "benchmarks" / "peers" / "recbole" / "run.py")
    folder = atomic.parents[1].absolute()
    words = [str(Path(program).absolute()), runner, str(folder), atomic.stem, str(EPOCHS), "0"]
    print(
        f"RecBole's {EPOCHS} epochs begin; TensorBoard shows each: {folder / 'log_tensorboard'}",
        flush=True,
    )
    theirs = _train(words, folder)  # RecBole writes logs to its working folder
    printed = json.loads(theirs.pop("printed").splitlines()[-1])
    peer: Row = {"arm": PEER, **theirs, **printed}
    return peer | {name: printed["test"][other] for name, other in _METRICS.items()}


def write_atomic(histories: Path, path: Path) -> None:
    """Writes the events of a histories file in RecBole's atomic format."""
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
    """Runs a program. Returns its processor seconds and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # use every core, whatever this process's own limit
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
        at_least(
            f"{about}: {name} over that of {PEER} after {peer['epochs']} epochs",
            1.0,
            own[name] / peer[name],
            "x",
        )
        for name in _METRICS
    ]
    share = own["seconds"] / peer["seconds"]
    text = f"{about}: seconds of training over those of {PEER}"
    claims.append(at_most(text, _SHARE, share, "x"))
    command = f"{plan.describe_command()} --recbole"
    name = f"{plan.arm}-{plan.name}-recbole-cpu"
    write(
        "quality",
        name,
        command,
        rows,
        claims,
        to=to,
        dataset=plan.describe_data(),
        method=(__doc__ or "").strip(),
    )
