"""What optimizers and modules keep from step to step: saved as it is, restored as it was, or
refused by name before training."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import rewrite_as_format_1
from helpers.ranks import run_ranks
from helpers.toys import Clicks, clicks_batch, rank_slice
from helpers.training import snapshot
from torch import nn

import freescale
from freescale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from freescale.data.synthetic.generate import generate
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport

OPTIMIZERS = {
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


class PlainAdam(torch.optim.Optimizer):
    """Its step is a number, as outside torch it often is."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                root = (state["square"] / (1 - 0.999 ** state["step"])).sqrt().add_(1e-8)
                p.addcdiv_(state["mean"], root, value=-group["lr"] / (1 - 0.9 ** state["step"]))


class Hoarder(torch.optim.SGD):
    """Keeps a bit of everything that can be saved."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            history = self.state[p].setdefault(
                "history", {"last": [], 7: ("text", None, True, 0.1 + 0.2), "empty": {}}
            )
            history["last"] = [*history["last"], p.detach().clone()][-2:]
        self.state["seen"] = {
            "steps": self.state["seen"].get("steps", 0) + 1,
            "total": torch.tensor(3),
        }


class Counter:
    """No checkpoint can hold it without executing what it reads."""


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        torch.rand(1)
        self.state[self.param_groups[0]["params"][0]]["counter"] = [Counter()]


class Remembering(Clicks):
    """With state beside its tensors, in the model and in a module of it."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.count, self.kept = 0, torch.zeros(2)
        self.inner = Inner()

    def forward(self, batch):
        self.count += len(batch)
        self.kept = self.kept + 1
        self.inner.seen = f"batch {batch.number}"
        return super().forward(batch)

    def get_extra_state(self):
        return {"count": self.count, "kept": [self.kept]}

    def set_extra_state(self, state):
        self.count, (self.kept,) = state["count"], state["kept"]


class Inner(nn.Module):
    seen = ""

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


class Frozen(Clicks):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)


def build(optimizer=OPTIMIZERS["AdamW"], model=Clicks, transport=None):
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        model(),
        Clicks.ids,
        freescale.Adam(lr=0.1),
        transport=transport,
        placement="sharded",
        init_std=0.3,
    )
    dense = optimizer(parallel.dense_parameters())
    return parallel, dense, freescale.Pipeline(parallel, dense)


def run(pipeline, first, last):
    list(pipeline.run([clicks_batch(5, seed) for seed in range(first, last)]))


def assert_equal(actual, expected):
    actual, expected = snapshot(actual), snapshot(expected)
    assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []


def same(left, right):
    if isinstance(right, torch.Tensor):
        return (
            isinstance(left, torch.Tensor)
            and left.dtype == right.dtype
            and torch.equal(left, right)
        )
    if isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in right)
    if isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def state_of(optimizer, parallel):
    named = {id(p): name for name, p in parallel.module.named_parameters()}
    return {named.get(id(key), key): entries for key, entries in optimizer.state.items()}


# ---- optimizers


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_save_before_the_first_step_changes_nothing(tmp_path, optimizer):
    expected, _, pipeline = build(optimizer)
    run(pipeline, 0, 4)
    saved, dense, pipeline = build(optimizer)
    saved.tables.place()
    before = {key: dict(entries) for key, entries in state_of(dense, saved).items()}
    checkpoints = Checkpoints(tmp_path, LocalTransport())
    checkpoints.check(saved, dense)
    checkpoints.save(saved, dense, {"step": 0})
    assert same(state_of(dense, saved), before)
    run(pipeline, 0, 4)
    assert_equal(saved, expected)
    resumed, dense, pipeline = build(optimizer)
    checkpoints.load(checkpoints.path(0), resumed, dense)
    run(pipeline, 0, 4)
    assert_equal(resumed, expected)


@pytest.mark.parametrize(
    "optimizer",
    [*OPTIMIZERS.values(), PlainAdam, Hoarder],
    ids=[*OPTIMIZERS, "PlainAdam", "Hoarder"],
)
def test_any_optimizer_resumes_to_the_bit(tmp_path, optimizer):
    parallel, dense, pipeline = build(optimizer)
    run(pipeline, 0, 3)
    checkpoints = Checkpoints(tmp_path, LocalTransport())
    checkpoints.save(parallel, dense, {"step": 3, "pipeline": pipeline.state_dict()})
    resumed, fresh, again = build(optimizer)
    again.load_state_dict(checkpoints.load(checkpoints.path(3), resumed, fresh)["pipeline"])
    assert same(state_of(fresh, resumed), state_of(dense, parallel))
    run(pipeline, 3, 6)
    run(again, 3, 6)
    assert_equal(resumed, parallel)
    # And going back, in an optimizer that has state: nothing of it is left.
    again.load_state_dict(checkpoints.load(checkpoints.path(3), resumed, fresh)["pipeline"])
    run(again, 3, 6)
    assert_equal(resumed, parallel)


def test_a_checkpoint_with_tensors_alone_resumes(tmp_path):
    """As they were saved before other state was."""
    parallel, dense, pipeline = build()
    run(pipeline, 0, 3)
    checkpoints = Checkpoints(tmp_path, LocalTransport())
    rewrite_as_format_1(
        checkpoints.save(parallel, dense, {"step": 3, "pipeline": pipeline.state_dict()})
    )
    resumed, fresh, again = build()
    again.load_state_dict(checkpoints.load(checkpoints.path(3), resumed, fresh)["pipeline"])
    run(pipeline, 3, 6)
    run(again, 3, 6)
    assert_equal(resumed, parallel)


def test_a_model_with_a_frozen_parameter_resumes(tmp_path):
    parallel, dense, pipeline = build(model=Frozen)
    run(pipeline, 0, 3)
    checkpoints = Checkpoints(tmp_path, LocalTransport())
    checkpoints.save(parallel, dense, {"step": 3, "pipeline": pipeline.state_dict()})
    resumed, fresh, again = build(model=Frozen)
    again.load_state_dict(checkpoints.load(checkpoints.path(3), resumed, fresh)["pipeline"])
    assert resumed.module.scale not in fresh.state
    run(pipeline, 3, 5)
    run(again, 3, 5)
    assert_equal(resumed, parallel)


def test_state_that_cannot_be_saved_is_refused_by_name_before_training_and_at_a_save(tmp_path):
    parallel, dense, pipeline = build(lambda p: Counting(p, lr=0.1))
    checkpoints = Checkpoints(tmp_path, LocalTransport())
    before, noise = snapshot_of_dense(parallel), torch.get_rng_state()
    with pytest.raises(ValueError, match="optimizer/layers.0.weight/counter/0 is a Counter"):
        checkpoints.check(parallel, dense)
    assert torch.equal(torch.get_rng_state(), noise) and not dense.state
    assert all(
        torch.equal(value, before[name]) for name, value in snapshot_of_dense(parallel).items()
    )
    run(pipeline, 0, 1)
    with pytest.raises(ValueError, match="optimizer/layers.0.weight/counter/0 is a Counter"):
        checkpoints.save(parallel, dense, {"step": 1})
    assert not list(tmp_path.iterdir())


def snapshot_of_dense(parallel):
    return {name: p.detach().clone() for name, p in parallel.module.named_parameters()}


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    parallel, _, _ = build()
    other = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter of shape \(3,\) that is not the model's"):
        Checkpoints(tmp_path, LocalTransport()).check(parallel, other)


def test_progress_that_is_no_json_is_refused(tmp_path):
    parallel, dense, _ = build()
    parallel.tables.place()
    with pytest.raises(ValueError, match="progress must be plain JSON"):
        Checkpoints(tmp_path, LocalTransport()).save(
            parallel, dense, {"step": 1, "data": torch.zeros(1)}
        )


# ---- modules


def test_extra_state_of_modules_is_saved_and_restored(tmp_path):
    parallel, dense, pipeline = build(model=Remembering)
    run(pipeline, 0, 2)
    checkpoints = Checkpoints(tmp_path, LocalTransport())
    checkpoints.check(parallel, dense)
    path = checkpoints.save(parallel, dense, {"step": 2})
    resumed, fresh, _ = build(model=Remembering)
    checkpoints.load(path, resumed, fresh)
    assert resumed.module.count == 10 and torch.equal(resumed.module.kept, torch.full((2,), 2.0))
    assert resumed.module.inner.seen == "batch 1"
    assert json.loads((path / "state.json").read_text())["extra_state"]["inner"] == "batch 1"
    other, fresh, _ = build()
    with pytest.raises(ValueError, match="another model: module '' has extra state only there"):
        checkpoints.load(path, other, fresh)


def test_extra_state_that_cannot_be_saved_is_refused_by_name(tmp_path):
    parallel, dense, pipeline = build(model=Remembering)
    parallel.module.inner.seen = Counter()
    with pytest.raises(ValueError, match="extra/inner._extra_state is a Counter"):
        Checkpoints(tmp_path, LocalTransport()).check(parallel, dense)
    run(pipeline, 0, 1)
    parallel.module.inner.seen = Counter()
    with pytest.raises(ValueError, match="extra/inner._extra_state is a Counter"):
        Checkpoints(tmp_path, LocalTransport()).save(parallel, dense, {"step": 1})


# ---- the order of sums


class Alternating(nn.Module):
    """The order of its layers, and so of its backward, is each batch's own."""

    ids = {"item": ["history"]}

    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(200, 16, device="meta")
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 2500), nn.Tanh(), nn.Linear(2500, 16)) for _ in range(2)
        )
        self.out = nn.Linear(16, 2)

    def forward(self, batch):
        history = batch.sequences["history"]
        sample = torch.repeat_interleave(torch.arange(len(batch)), history.lengths)
        x = torch.zeros(len(batch), 16).index_add(0, sample, self.item(history.values))
        for branch in self.branches if batch.number % 2 == 0 else reversed(self.branches):
            x = x + branch(x)
        losses = nn.functional.binary_cross_entropy_with_logits(
            self.out(x), batch.dense["labels"], reduction="none"
        ).sum(0)
        return {"click": losses[0], "like": losses[1]}


def alternating(transport):
    torch.manual_seed(0)
    parallel = freescale.parallelize(
        Alternating(), Alternating.ids, transport=transport, placement="sharded", init_std=0.1
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2)
    return parallel, dense, freescale.Pipeline(parallel, dense, schedule="staged")


def resume_after_an_odd_step(transport, folder):
    data = [rank_slice(clicks_batch(9, seed), transport.rank, transport.world) for seed in range(7)]
    parallel, dense, pipeline = alternating(transport)
    checkpoints = Checkpoints(Path(folder), transport)
    for result in pipeline.run(data):
        if result.step == 3:
            checkpoints.save(parallel, dense, {"step": 3, "pipeline": pipeline.state_dict()})
    resumed, dense, again = alternating(transport)
    assert len(again.schedule.buckets.flat) > 1
    again.load_state_dict(checkpoints.load(checkpoints.path(3), resumed, dense)["pipeline"])
    list(again.run(data[3:]))
    assert_equal(resumed, parallel)


def load_the_order(transport, folder):
    parallel, dense, pipeline = alternating(transport)
    progress = Checkpoints(Path(folder), transport).load(
        Path(folder) / "step-00000003", parallel, dense
    )
    pipeline.load_state_dict(progress["pipeline"])
    names = [name for name, _ in parallel.module.named_parameters()]
    return [names[number] for number in pipeline.schedule.buckets.order]


def test_sums_go_on_in_the_order_that_they_had(tmp_path):
    """Three numbers have sums that depend on it; on another number of ranks the order is the
    same."""
    run_ranks(3, resume_after_an_odd_step, str(tmp_path))
    saved = json.loads((tmp_path / "step-00000003" / "state.json").read_text())["progress"][
        "pipeline"
    ]["order"]
    assert load_the_order(LocalTransport(), tmp_path) == saved and len(saved) == 10


# ---- divergence


class Masked(Clicks):
    """With a mask as models of attention have it."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))


def diverge(transport, folder, where):
    """On the last rank alone. -> what each rank said."""
    parallel, dense, pipeline = build(model=Masked, transport=transport)
    run(pipeline, 0, 2)
    checkpoints = Checkpoints(Path(folder), transport, keep=1)
    checkpoints.save(parallel, dense, {"step": 2})
    assert checkpoints.steps() == [2]
    if transport.rank == transport.world - 1:
        tensors = {
            "table": parallel.tables.get_local_state("item")["rows"],
            "row state": parallel.tables.get_local_state("item")["first"],
            "dense": parallel.module.layers[0].weight.data,
            "mask": parallel.module.mask,
            "optimizer": dense.state[parallel.module.layers[0].weight]["exp_avg"],
        }
        tensors[where].view(-1)[-1] = float("nan")
    with pytest.raises(ValueError, match="is not finite at step 3") as error:
        checkpoints.save(parallel, dense, {"step": 3})
    assert [path.name for path in Path(folder).iterdir()] == ["step-00000002"]
    fresh, again, _ = build(model=Masked, transport=transport)
    assert checkpoints.load(checkpoints.path(2), fresh, again)["step"] == 2
    return str(error.value)


NAMES = {
    "table": "table/item/rows",
    "row state": "table/item/first",
    "dense": "dense/layers.0.weight",
    "mask": "dense/mask",
    "optimizer": "optimizer/layers.0.weight/exp_avg",
}


@pytest.mark.parametrize("where", NAMES)
def test_what_is_not_finite_is_not_saved_and_the_last_good_one_stays(tmp_path, where):
    assert diverge(LocalTransport(), tmp_path, where).startswith(f"{NAMES[where]} is not finite")


def test_all_ranks_refuse_what_one_finds_not_finite(tmp_path):
    said = run_ranks(2, diverge, str(tmp_path), "table")
    assert said[0] == said[1] and said[0].startswith("table/item/rows is not finite")


# ---- a run


def trainer(folder, steps, resume=False, **options):
    data = folder / "data.parquet"
    if not data.exists():
        generate(data, users=60, items=40, median=8.0, cap=12, seed=1)
    sizes = DataConfig(data=str(data), max_length=10, negatives=4)
    settings = TrainConfig(global_batch=8, steps=steps, trace_steps=0, **options)
    config = RunConfig(sizes, ModelConfig(width=8, layers=1, heads=1), settings)
    return Trainer(
        config, folder / "run", resume=resume, histories=data, transport=LocalTransport()
    )


def test_a_run_refuses_a_folder_with_other_checkpoints_before_it_trains(tmp_path):
    trainer(tmp_path, 2).train()
    with pytest.raises(ValueError, match="already holds a run: name another folder"):
        trainer(tmp_path, 4)
    trainer(tmp_path, 4, resume=True).train()


def test_a_run_that_diverges_between_two_looks_at_its_loss_keeps_its_good_checkpoints(tmp_path):
    settings = {"checkpoint_every": 2, "log_every": 1000, "keep_checkpoints": 2}
    trainer(tmp_path, 4, **settings).train()
    checkpoints = tmp_path / "run" / "checkpoints"
    before = sorted(path.name for path in checkpoints.iterdir())
    with pytest.raises(
        ValueError,
        match=("the loss is nan at step 6: lower --lr and --row-lr, or set --clip and --row-clip"),
    ):
        trainer(tmp_path, 40, resume=True, lr=1e30, row_lr=1e30, **settings).train()
    assert (
        sorted(path.name for path in checkpoints.iterdir())
        == before
        == ["step-00000002", "step-00000004"]
    )
    assert math.isfinite(trainer(tmp_path, 8, resume=True, **settings).train()["loss"])
