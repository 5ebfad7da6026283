"""The proof that a run through a storm is the run that it would have been: the samples of every
step, its losses, and the final tables, row state, weights and optimizer state, against a run that
nothing happened to."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faults.forked import fork
from faults.testbed import set_precision
from freescale.config import RunConfig
from freescale.train.build import prepare_data
from freescale.train.trainer import Trainer
from freescale.transport.connect import connect

Line = dict[str, Any]  # of a rank and a step: batch number, loss and digests of the samples


@dataclass(frozen=True)
class Log:
    """What the ranks of a run trained.

    Attributes:
        kept: of each step of the run as it ended: all ranks' lines of the attempt that made it.
        repeated: lines of steps that were made, and lost again.
        made: all lines, kept and lost.
    """

    kept: dict[int, list[Line]]
    repeated: int
    made: list[Line]


def read_log(folder: Path) -> Log:
    """The logs of all ranks in all attempts. A rank's attempt begins behind the step that it
    restored, and takes the place of what was made before behind that step."""
    kept: dict[int, dict[int, Line]] = {}  # by rank and step
    made: list[Line] = []
    files = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.name.split("-")[0]))
    for path in files:
        rank = int(path.stem.split("-")[1])
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if "began" in line:
                # ranks of a larger world before this attempt are gone
                for other in [r for r in kept if r >= line["world"]] + [rank]:
                    own = kept.setdefault(other, {})
                    for step in [step for step in own if step > line["began"]]:
                        del own[step]
            else:
                kept.setdefault(rank, {})[line["step"]] = line
                made.append(line | {"rank": rank})
    steps: dict[int, list[Line]] = {}
    for _, own in sorted(kept.items()):
        for step, line in own.items():
            steps.setdefault(step, []).append(line)
    survived = sum(len(lines) for lines in steps.values())
    return Log(dict(sorted(steps.items())), len(made) - survived, made)


def compare_logs(storm: Log, calm: Log) -> dict[str, Any]:
    """How the samples and losses of a run differ from those of the undisturbed one."""
    lost = doubled = other_batch = 0
    worst = 0.0
    for step in sorted(set(storm.kept) | set(calm.kept)):
        ours, theirs = storm.kept.get(step, []), calm.kept.get(step, [])
        mine, expected = (
            Counter(digest for line in lines for digest in line["samples"])
            for lines in (ours, theirs)
        )
        lost += sum((expected - mine).values())
        doubled += sum((mine - expected).values())
        other_batch += {line["batch"] for line in ours} != {line["batch"] for line in theirs}
        if ours and theirs:
            loss, reference = (float.fromhex(lines[0]["loss"]) for lines in (ours, theirs))
            worst = max(worst, abs(loss - reference) / abs(reference) / step)
    known = {step: lines[0]["loss"] for step, lines in calm.kept.items()}
    return {
        "steps": len(storm.kept),
        "lost_samples": lost,
        "doubled_samples": doubled,
        "other_batches": other_batch,
        "repeated_steps": storm.repeated,
        "losses_equal": all(line["loss"] == known.get(line["step"]) for line in storm.made),
        "loss_difference_a_step": worst,
    }


def compare_states(storm: Mapping[str, Tensor], calm: Mapping[str, Tensor]) -> dict[str, Any]:
    """How final states differ: by bits, and relative to the largest entry of a tensor."""
    if storm.keys() != calm.keys():
        raise ValueError(f"the states differ in {sorted(storm.keys() ^ calm.keys())}")
    worst, differing = 0.0, []
    for name, value in storm.items():
        expected = calm[name]
        if not torch.equal(value, expected):
            differing.append(name)
            scale = max(float(expected.abs().max()), 1e-30)
            worst = max(worst, float((value.double() - expected.double()).abs().max()) / scale)
    return {
        "tensors": len(storm),
        "differing_tensors": differing,
        "bits_equal": not differing,
        "difference": worst,
    }


def read_final_state(run: Path, said: Path, *, double: bool = False) -> dict[str, Tensor]:
    """Tables, row state, dense weights and optimizer state of the last checkpoint of a run, which
    may have trained in float64."""
    result = run / "final.pickle"

    def work() -> None:
        set_precision(double=double)
        config = RunConfig.from_json((run / "config.json").read_text(encoding="utf-8"))
        transport = connect("cpu")
        trainer = Trainer(
            config, run, resume=True, transport=transport, histories=prepare_data(config)
        )
        result.write_bytes(pickle.dumps(collect_state(trainer)))

    _, status = os.waitpid(fork(work, said), 0)
    if status:
        raise RuntimeError(f"the last checkpoint of {run} could not be read: see {said}")
    state: dict[str, Tensor] = pickle.loads(result.read_bytes())
    return state


def collect_state(trainer: Trainer) -> dict[str, Tensor]:
    """Of a run on one rank."""
    tables, module = trainer.model.tables, trainer.model.module
    found = {
        f"table {name}: {part}": value.clone()
        for name in tables.specs
        for part, value in tables.get_local_state(name).items()
    }
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    found |= {f"weight {name}": parameter.detach().clone() for parameter, name in names.items()}
    for parameter, state in trainer.optimizer.state.items():
        for part, value in state.items():
            found[f"optimizer {names[parameter]}: {part}"] = torch.as_tensor(value).clone()
    return found
