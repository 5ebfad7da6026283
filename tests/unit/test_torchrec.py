"""TorchRec's models trained here, against TorchRec's own modules with torch's optimizers."""

from __future__ import annotations

import runpy
from collections import defaultdict, namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("torchrec")

from helpers.ranks import run_ranks  # noqa: E402
from helpers.torchrec_cases import (  # noqa: E402
    ROWS,
    MixedModel,
    WideModel,
    build_dlrm,
    dlrm_batch,
    keyed,
    mixed_batch,
    pick,
    wide_batch,
)
from helpers.training import gather_tables  # noqa: E402
from torchrec.modules.embedding_configs import (  # noqa: E402
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from torchrec.modules.embedding_modules import (  # noqa: E402
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward  # noqa: E402
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # noqa: E402
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor  # noqa: E402

import freescale  # noqa: E402
import freescale.torchrec  # noqa: E402
from freescale.pipeline.staged import Staged  # noqa: E402
from freescale.torchrec.batches import BatchForm  # noqa: E402

CASES = {
    "dlrm": (build_dlrm, dlrm_batch, {}),
    "wide": (WideModel, wide_batch, {}),
    "mixed": (MixedModel, mixed_batch, {"shared": ["scale"], "loss_weight": "labels[1]"}),
}
OPTIMIZERS = {
    "sgd": (freescale.SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    "row-wise adagrad": (
        freescale.RowWiseAdagrad(lr=0.05, eps=1e-8),
        lambda p: RowWiseAdagrad(p, lr=0.05, eps=1e-8),
    ),
}


def is_table(name: str) -> bool:
    return "embedding_bags." in name or ".embeddings." in name


def train_torchrec(case, optimizer, batches):
    """Losses, and the model's state before each step and after the last."""
    model = CASES[case][0]()
    named = dict(model.named_parameters())
    tables = OPTIMIZERS[optimizer][1]([p for name, p in named.items() if is_table(name)])
    dense = torch.optim.SGD([p for name, p in named.items() if not is_table(name)], lr=0.1)
    losses, states = [], []
    for batch in batches:
        states.append({name: p.detach().clone() for name, p in named.items()})
        model.zero_grad()
        loss = model(batch)[0]
        loss.backward()
        tables.step()
        dense.step()
        losses.append(loss.item())
    states.append({name: p.detach().clone() for name, p in named.items()})
    return losses, states, [tables.state[p] for p in tables.param_groups[0]["params"]]


def build(case, optimizer, state=None, transport=None, **options):
    make, _, form = CASES[case]
    model = make()
    if state is not None:
        model.load_state_dict(state)
    sharded = freescale.torchrec.parallelize(
        model, OPTIMIZERS[optimizer][0], transport=transport, placement="sharded", **form
    )
    dense = torch.optim.SGD(sharded.dense_parameters(), lr=0.1)
    return sharded, freescale.torchrec.Pipeline(sharded, dense, **options)


def state_of(sharded):
    """By TorchRec's names."""
    tables = {
        name.replace("/rows", ".weight"): value
        for name, value in gather_tables(sharded).items()
        if name.endswith("/rows")
    }
    dense = sharded.module.model.named_parameters()
    return tables | {name: value.detach().clone() for name, value in dense}


def train(case, optimizer, batches, state=None, transport=None, **options):
    sharded, pipeline = build(case, optimizer, state, transport, **options)
    losses = [result.loss for result in pipeline.run(batches)]
    pipeline.flush()
    return losses, state_of(sharded)


def assert_near(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_torchrec_does(case, optimizer):
    batches = [CASES[case][1](seed) for seed in range(10)]
    expected, states, _ = train_torchrec(case, optimizer, batches)
    losses, state = train(case, optimizer, batches)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert_near(state, states[-1], 1e-5)
    serial, same = train(case, optimizer, batches, schedule="serial")
    staged, also = train(case, optimizer, batches, schedule=Staged)
    assert losses == serial == staged
    for name, value in state.items():
        assert torch.equal(value, same[name]) and torch.equal(value, also[name]), name


@pytest.mark.parametrize("case", ["dlrm", "mixed"])
def test_one_step_from_five_states(case):
    batches = [CASES[case][1](seed) for seed in range(6)]
    expected, states, _ = train_torchrec(case, "sgd", batches)
    for step in (0, 1, 2, 3, 5):
        losses, state = train(case, "sgd", batches[step : step + 1], states[step])
        assert losses == pytest.approx(expected[step : step + 1], abs=1e-6)
        assert_near(state, states[step + 1], 1e-6)


def test_two_ranks_with_balancing_train_as_one():
    run_ranks(2, _compare_with_one_process)


def _compare_with_one_process(transport):
    half = [list(range(0, 4)), list(range(4, 12))][transport.rank]
    for case, options in (("dlrm", {}), ("mixed", {"cost_feature": "h"}), ("wide", {})):
        batches = [CASES[case][1](seed) for seed in range(5)]
        expected, state = train(case, "sgd", batches)
        mine = [pick(batch, half) for batch in batches]
        losses, ours = train(case, "sgd", mine, None, transport, balance="greedy", **options)
        assert losses == pytest.approx(expected, abs=1e-6)
        assert_near(ours, state, 1e-6)


def test_progress_takes_iterators_one_after_another_and_returns_outputs():
    sharded, pipeline = build("mixed", "sgd")
    first, second = iter([mixed_batch(seed) for seed in range(3)]), iter([mixed_batch(3)])
    expected, _, _ = train_torchrec("mixed", "sgd", [mixed_batch(seed) for seed in range(4)])
    losses = []
    for source in (first, first, first, second):
        outputs = pipeline.progress(source)
        assert outputs["logits"].shape == (12,) and not outputs["logits"].requires_grad
        losses.append(pipeline.last.loss)
    assert losses == pytest.approx(expected, abs=1e-5)
    for _ in range(2):
        with pytest.raises(StopIteration):
            pipeline.progress(second)
    pipeline.progress(iter([mixed_batch(4)]))
    assert pipeline.steps == 5


def test_a_checkpoint_resumes_exactly(tmp_path):
    batches = [dlrm_batch(seed) for seed in range(6)]
    expected, state = train("dlrm", "row-wise adagrad", batches)
    sharded, pipeline = build("dlrm", "row-wise adagrad")
    losses = [result.loss for result in pipeline.run(batches[:3])]
    checkpoints = freescale.Checkpoints(tmp_path, sharded.transport)
    progress = {"step": 3, "pipeline": pipeline.state_dict()}
    checkpoints.save(sharded, pipeline.optimizer, progress)
    sharded, pipeline = build("dlrm", "row-wise adagrad")
    progress = checkpoints.load(checkpoints.latest(), sharded, pipeline.optimizer)
    pipeline.load_state_dict(progress["pipeline"])
    losses += [result.loss for result in pipeline.run(batches[3:])]
    assert losses == expected
    assert all(torch.equal(value, state[name]) for name, value in state_of(sharded).items())


def test_reading_and_evaluation_take_torchrec_batches():
    model = build_dlrm()
    expected, (_, logits, _) = model(dlrm_batch(3))
    sharded, _ = build("dlrm", "sgd")
    with sharded.reading(dlrm_batch(3)) as batch:
        loss, (_, ours, _) = sharded(batch)
    assert torch.equal(loss, expected) and torch.equal(ours, logits)
    found = freescale.evaluate(sharded, [dlrm_batch(3)])
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_collections_return_what_they_returned():
    model, batch = MixedModel(), mixed_batch(2)
    pooled = model.pooled(batch.features["user"])
    rows = model.sequences(batch.features["item"])
    sharded = freescale.torchrec.parallelize(model, shared=["scale"])
    with sharded.reading(batch) as encoded:
        again = sharded.form.decode(encoded)
        ours = model.pooled(again.features["user"])
        others = model.sequences(again.features["item"])
    assert isinstance(ours, KeyedTensor) and ours.keys() == pooled.keys() == ["u", "v@a", "v@b"]
    torch.testing.assert_close(ours.values(), pooled.values())
    assert others.keys() == rows.keys()
    for name, part in rows.items():
        assert torch.equal(others[name].values(), part.values())
        assert torch.equal(others[name].lengths(), part.lengths())
        assert torch.equal(others[name].weights(), part.weights())
    assert model.pooled.embedding_bag_configs()[0].name == "a" and not model.pooled.is_weighted()
    assert model.sequences.embedding_dim() == 4 and model.sequences.need_indices()


def test_ids_that_the_model_changes_in_place_are_read_as_they_are():
    model, batch = MixedModel(), mixed_batch(2)
    wanted = int(batch.features["user"]["u"].values()[0])
    changed = mixed_batch(2).features["user"]
    changed.values().fill_(wanted)
    expected = model.pooled(changed)["u"]
    sharded = freescale.torchrec.parallelize(model, shared=["scale"])
    with sharded.reading(batch) as encoded:
        features = sharded.form.decode(encoded).features["user"]
        features.values().fill_(wanted)
        announced = KeyedJaggedTensor(
            ["u"], features["u"].values(), lengths=features["u"].lengths()
        )
        assert sharded.form.find_announced(features) is None
        torch.testing.assert_close(pool_alone(model.pooled, announced), expected)


def pool_alone(collection, features):
    """Of a collection that reads other features too: they are empty."""
    lengths = torch.cat([features.lengths(), torch.zeros_like(features.lengths())])
    both = KeyedJaggedTensor(["u", "v"], features.values(), lengths=lengths)
    return collection(both)["u"]


# ---- batches


@pytest.mark.parametrize("make", [dlrm_batch, mixed_batch])
def test_samples_are_selected_as_torchrec_would(make):
    form = BatchForm(() if make is dlrm_batch else ("scale",))
    batch, index = make(5), [7, 0, 0, 11, 3]
    encoded = form.encode(batch)
    for ours, expected in (
        (form.decode(encoded), batch),
        (form.decode(encoded.select(torch.tensor(index))), pick(batch, index)),
        (form.decode(encoded.slice(2, 6)), pick(batch, [2, 3, 4, 5])),
    ):
        assert type(ours) is type(batch)
        flat = [form.encode(each) for each in (ours, expected)]
        pairs = zip(flat[0].tensors(), flat[1].tensors(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert flat[0].parts().keys() == flat[1].parts().keys()
    if make is dlrm_batch:
        assert form.decode(encoded).sparse_features.lengths().dtype == torch.int32


class Own:
    pass


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (
            {"x": keyed(["a"], 0), "table": torch.ones(3)},
            {},
            r"tensor 'table' of the batch has shape \[3\].*12 samples.*shared=\['table'\]",
        ),
        ({"x": keyed(["a"], 0), "y": [keyed(["a"], 1)]}, {}, r"'a' is in 'x' and in 'y\[0\]'"),
        ({"x": keyed(["a"], 0), "y": keyed(["b"], 1, 3)}, {}, "differ in their number of samples"),
        ({"x": keyed(["a"], 0), "y": Own()}, {}, "'y' of the batch is a Own"),
        (
            {"x": JaggedTensor(torch.arange(5), lengths=torch.tensor([1, 2]))},
            {},
            "feature 'x': lengths add up to 3, but there are 5 values",
        ),
        ({"x": keyed(["a"], 0)}, {"shared": ["scale"]}, "shared names 'scale', which is no tensor"),
        ({"x": keyed(["a"], 0)}, {"loss_weight": "w"}, "loss_weight names 'w'"),
        (
            KeyedJaggedTensor(
                ["a", "b"],
                torch.arange(3),
                lengths=torch.ones(3, dtype=torch.int64),
                stride_per_key_per_rank=[[1], [2]],
            ),
            {},
            "'batch' of the batch has a batch size of its own for each feature",
        ),
    ],
    ids=["axis", "twice", "sizes", "type", "values", "shared", "weight", "own batch sizes"],
)
def test_batches_that_cannot_be_moved_are_refused(batch, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        BatchForm(**options).encode(batch)


def test_containers_of_every_kind_come_back():
    Pair = namedtuple("Pair", ["ids", "label"])  # noqa: PYI024
    batch = defaultdict(list, pair=Pair(keyed(["a"], 0), torch.rand(12)), more=[torch.rand(12, 2)])
    form = BatchForm()
    again = form.decode(form.encode(batch))
    assert type(again) is defaultdict and type(again["pair"]) is Pair and again["none"] == []
    assert torch.equal(again["pair"].label, batch["pair"].label)
    assert torch.equal(again["more"][0], batch["more"][0])
    assert torch.equal(again["pair"].ids.values(), batch["pair"].ids.values())


def test_later_batches_have_the_form_of_the_first():
    form = BatchForm()
    form.encode({"x": keyed(["a"], 0), "kind": "train"})
    with pytest.raises(ValueError, match="'kind' is 'test' in this batch and was 'train'"):
        form.encode({"x": keyed(["a"], 0), "kind": "test"})
    with pytest.raises(ValueError, match="the batch lacks kind"):
        form.encode({"x": keyed(["a"], 0)})
    with pytest.raises(ValueError, match="'x' is .* in this batch"):
        form.encode({"x": keyed(["b"], 0), "kind": "train"})


# ---- what is refused, and plans


def collection(**options):
    shape = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "feature_names": ["f"]}
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(**shape | options)], device=torch.device("meta")
    )


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *a: None)
    return module


def managed() -> nn.Module:
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    bags = collection()
    module = MCHManagedCollisionModule(
        zch_size=10,
        device=torch.device("meta"),
        eviction_interval=2,
        eviction_policy=DistanceLFU_EvictionPolicy(),
    )
    modules = ManagedCollisionCollection({"t": module}, bags.embedding_bag_configs())
    return ManagedCollisionEmbeddingBagCollection(bags, modules)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: collection(use_virtual_table=True), "table 't' of 'x': virtual tables"),
        (lambda: collection(data_type=DataType.FP16), "'t' of 'x': data_type FP16"),
        (lambda: collection(num_embeddings_post_pruning=5), "'t' of 'x': pruned tables"),
        (managed, "'x' is a ManagedCollisionEmbeddingBagCollection: managed collision"),
        (
            lambda: type("Mine", (EmbeddingBagCollection,), {})(tables=[]),
            "'x' is a Mine: it is derived from EmbeddingBagCollection",
        ),
        (lambda: with_hook(collection()), "'x' is a EmbeddingBagCollection: it has hooks"),
        (lambda: nn.Linear(1, 1), "the model has no EmbeddingCollection"),
        (
            lambda: collection(init_fn=nn.init.zeros_),
            "'t' is on the meta device and has an init_fn",
        ),
    ],
    ids=["virtual", "fp16", "pruned", "managed", "derived", "hooks", "none", "init_fn"],
)
def test_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        freescale.torchrec.parallelize(nn.ModuleDict({"x": make()}))


def test_refused_before_memory_is_taken():
    """A table of a terabyte would not fit; the model is as it was."""
    model = nn.ModuleDict({"x": collection(num_embeddings=1 << 36), "y": managed()})
    kept = dict(model.named_modules())
    with pytest.raises(ValueError, match="'y' is a ManagedCollisionEmbeddingBagCollection"):
        freescale.torchrec.parallelize(model, freescale.SGD(lr=0.1))
    assert dict(model.named_modules()) == kept


def parameter(kind):
    from torchrec.distributed.types import ParameterSharding

    return ParameterSharding(kind, "fused", ranks=[0])


def test_plans(capsys):
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

    path = "model.sparse_arch.embedding_bag_collection"
    kinds = {"t0": "row_wise", "t1": "data_parallel", "t2": "table_wise"}
    plan = ShardingPlan(
        {path: EmbeddingModuleShardingPlan({t: parameter(kind) for t, kind in kinds.items()})}
    )
    sharded = freescale.torchrec.parallelize(build_dlrm(), plan=plan, placement={"t3": "sharded"})
    sharded.tables.place()
    placed = {name[-2:]: where.kind for name, where in sharded.tables.placements.items()}
    assert placed == {"t0": "sharded", "t1": "replicated", "t2": "sharded", "t3": "sharded"}
    assert "table t2: table_wise in the plan, sharded by row here" in capsys.readouterr().out
    plan.plan[path]["t3"] = parameter("column_wise")
    with pytest.raises(ValueError, match="plan shards table 't3' of .* column_wise, which is not"):
        freescale.torchrec.parallelize(build_dlrm(), plan=plan)
    with pytest.raises(ValueError, match="the plan names module 'elsewhere'"):
        freescale.torchrec.parallelize(build_dlrm(), plan={"elsewhere": {}})


def test_optimizers_in_backward_and_names_of_configs():
    model = build_dlrm()
    tables = [p for name, p in model.named_parameters() if is_table(name)]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.2})
    found = freescale.torchrec.parallelize(model).tables.optimizers
    assert set(found.values()) == {freescale.RowWiseAdagrad(lr=0.2, eps=1e-8)}
    model = build_dlrm()
    tables = [p for name, p in model.named_parameters() if is_table(name)]
    apply_optimizer_in_backward(torch.optim.Adam, tables, {"lr": 0.2})
    found = freescale.torchrec.parallelize(model).tables.optimizers
    assert set(found.values()) == {freescale.Adam(lr=0.2, betas=(0.9, 0.999), eps=1e-8)}
    model = build_dlrm()
    apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters())[:1], {"momentum": 0.9})
    with pytest.raises(ValueError, match="table 't0' has SGD with {'momentum': 0.9}"):
        freescale.torchrec.parallelize(model)
    with pytest.raises(ValueError, match="row_optimizer names 't9', which is no table"):
        freescale.torchrec.parallelize(build_dlrm(), {"t9": freescale.SGD(lr=1.0)})


def test_rows_of_meta_tables_are_drawn_as_wide_as_the_config_says():
    sharded = freescale.torchrec.parallelize(build_dlrm(width=64, device="meta"))
    sharded.tables.place()
    name = next(iter(sharded.tables.specs))
    _, rows = sharded.tables.get_local_rows(name)
    assert rows.std().item() == pytest.approx((1 / ROWS / 3) ** 0.5, rel=0.05)


def test_samples_that_depend_on_each_other_are_found():
    class Longest(nn.Module):
        def __init__(self, normed):
            super().__init__()
            self.rows = EmbeddingCollection(
                tables=[
                    EmbeddingConfig(
                        name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"]
                    )
                ]
            )
            self.scale = nn.Identity()
            self.normed = normed

        def forward(self, features):
            rows: JaggedTensor = self.rows(features)["f"]
            longest = rows.lengths().max() if self.normed else 5
            sample = torch.repeat_interleave(torch.arange(features.stride()), rows.lengths().long())
            pooled = torch.zeros(features.stride(), 4).index_add(0, sample, rows.values())
            return (self.scale(pooled / longest) + 1).square().mean()

    check = freescale.torchrec.check_samples_independent
    check(Longest(False), keyed(["f"], 0))
    with pytest.raises(ValueError, match=r"depend on each other.*'model.scale' \(Identity\)"):
        check(Longest(True), keyed(["f"], 0))
    sharded = freescale.torchrec.parallelize(Longest(True))
    with pytest.raises(ValueError, match=r"depend on each other.*'model.scale' \(Identity\)"):
        freescale.check_samples_independent(sharded, keyed(["f"], 0))


def test_the_example_learns():
    example = Path(__file__).parents[2] / "examples" / "torchrec_dlrm.py"
    losses = runpy.run_path(str(example))["main"](steps=25)
    assert len(losses) == 25 and losses[-1] < losses[0] / 2  # ten batches, again and again
