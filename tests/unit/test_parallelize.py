"""parallelize: finds, swaps, refuses by name; the model's code and results stay."""

from __future__ import annotations

import pytest
import torch
from helpers.toys import Clicks, clicks_batch
from torch import nn
from torch.nn.utils import parametrize, prune

import freescale
from freescale.batch import Jagged, SequenceBatch
from freescale.embedding.parallelize import TableReader


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first
        self.second = second if second is not None else nn.Linear(4, 1)

    def forward(self, batch: SequenceBatch) -> dict[str, torch.Tensor]:
        return {"sum": self.second(self.first(batch.values("history"))).sum()}


def batch(*ids: int) -> SequenceBatch:
    values = torch.tensor(ids, dtype=torch.int64)
    return SequenceBatch(
        sequences={"history": Jagged(values, torch.tensor([len(ids)]))},
        weights={"sum": torch.ones(1)},
    )


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_kept_weights_give_the_same_output_and_gradients(placement):
    torch.manual_seed(0)
    plain = Pair(nn.Embedding(10, 4, padding_idx=2))
    with torch.no_grad():
        # nn.Embedding keeps a padding row's value and gives it no gradient
        plain.first.weight[2] = 7.0
    start = plain.first.weight.detach().clone()
    expected = plain(batch(3, 2, 3, 9))["sum"]
    expected.backward()
    gradient = plain.first.weight.grad.clone()
    parallel = freescale.parallelize(
        plain, {"first": ["history"]}, freescale.SGD(lr=1.0), init="weights", placement=placement
    )
    assert isinstance(plain.first, TableReader) and not list(plain.first.parameters())
    pipeline = freescale.Pipeline(parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.0))
    (result,) = pipeline.run([batch(3, 2, 3, 9)])
    assert result.loss == pytest.approx(expected.item())
    ids, rows = parallel.tables.get_local_rows("first")
    torch.testing.assert_close(rows[ids.argsort()], start - gradient)


def test_new_rows_depend_on_seed_table_and_row_and_padding_is_zero():
    def rows(seed, name="first"):
        model = Pair(nn.Embedding(50, 4, padding_idx=3, device="meta"))
        parallel = freescale.parallelize(model, {name: ["history"]}, seed=seed, init_std=0.5)
        parallel.tables.place()
        ids, values = parallel.tables.get_local_rows(name)
        return values[ids.argsort()]

    assert torch.equal(rows(1), rows(1)) and not torch.equal(rows(1), rows(2))
    assert not rows(1)[3].any() and abs(rows(1).std() - 0.5) < 0.1


def test_the_same_module_under_two_names_is_one_table():
    shared = nn.Embedding(10, 4)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = shared, shared

    parallel = freescale.parallelize(Twice(), {"a": ["history"]})
    assert parallel.module.a is parallel.module.b and len(parallel.tables.specs) == 1


def test_suffix_names_and_dense_embeddings():
    model = nn.ModuleDict({"encoder": Pair(nn.Embedding(10, 4)), "position": nn.Embedding(5, 4)})
    parallel = freescale.parallelize(model, {"first": ["history"]})
    assert list(parallel.tables.specs) == ["encoder.first"]
    assert "position.weight" in dict(parallel.module.named_parameters())


class Normed(nn.Embedding):
    pass


def frozen() -> nn.Embedding:
    module = nn.Embedding(10, 4)
    module.weight.requires_grad_(False)
    return module


def with_hook(register: str) -> nn.Embedding:
    module = nn.Embedding(10, 4)
    getattr(module, register)(lambda *a: None)
    return module


def with_weight_hook(register: str, kind: type) -> nn.Module:
    module = kind(10, 4)
    getattr(module.weight, register)(lambda *a: None)
    return module


def with_forward() -> nn.Embedding:
    module = nn.Embedding(10, 4)
    module.forward = lambda ids: nn.functional.embedding(ids, module.weight) * 2
    return module


def parametrized() -> nn.Embedding:
    module = nn.Embedding(10, 4)
    parametrize.register_parametrization(module, "weight", nn.Tanh())
    return module


def pruned() -> nn.Embedding:
    return prune.l1_unstructured(nn.Embedding(10, 4), "weight", 0.5)


def tied() -> Pair:
    pair = Pair(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    pair.second.weight = pair.first.weight
    return pair


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Pair(nn.Embedding(10, 4, max_norm=1.0)), "'first': max_norm is not supported"),
        (
            Pair(nn.Embedding(10, 4, scale_grad_by_freq=True)),
            ("'first': scale_grad_by_freq is not supported"),
        ),
        (Pair(Normed(10, 4)), "Normed is a subclass of nn.Embedding"),
        (Pair(frozen()), "its weight is frozen"),
        *(
            (Pair(with_hook(f"register_{name}_hook")), "'first': it has hooks")
            for name in ("forward", "forward_pre", "full_backward", "full_backward_pre")
        ),
        *(
            (
                Pair(with_weight_hook(f"register_{name}", kind)),
                "'first': its parameter 'first.weight' has hooks.*detach the rows",
            )
            for name in ("hook", "post_accumulate_grad_hook")
            for kind in (nn.Embedding, nn.EmbeddingBag)
        ),
        (Pair(with_forward()), "'first': its forward was replaced"),
        (Pair(parametrized()), "ParametrizedEmbedding is a subclass of nn.Embedding"),
        (Pair(pruned()), "'first': its weight is computed from other parameters"),
        (
            Pair(nn.Embedding(10, 4, dtype=torch.bfloat16)),
            ("tables are float32 or float64, not torch.bfloat16"),
        ),
        (tied(), r"its weight is tied \(first.weight, second.weight\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_name(model, message):
    with pytest.raises(ValueError, match=message):
        freescale.parallelize(model, {"first": ["history"]})


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        pytest.param(
            {"nowhere": ["history"]},
            {},
            "module 'nowhere', which matches none; the embeddings are",
            id="unknown module",
        ),
        pytest.param({}, {}, "ids is empty", id="no ids"),
        pytest.param(
            {"first": "history"}, {}, "must be a list of batch features", id="features are no list"
        ),
        pytest.param(
            {"first": ["history"]},
            {"init": "zeros"},
            "init must be one of auto, weights, rows",
            id="unknown init",
        ),
        pytest.param(
            {"first": ["history"]},
            {"row_optimizer": {"other": freescale.SGD()}},
            r"row_optimizer names \['other'\]",
            id="row optimizer of an unknown table",
        ),
        pytest.param(
            {"first": ["history"]},
            {"row_clip": 0.0},
            "row_clip must be positive",
            id="row clip of 0",
        ),
    ],
)
def test_bad_arguments(ids, options, message):
    with pytest.raises(ValueError, match=message):
        freescale.parallelize(Pair(nn.Embedding(10, 4)), ids, **options)


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_ids_that_were_not_announced_raise_and_name_the_module(placement):
    class Sneaky(Pair):
        def forward(self, batch):
            return {"sum": self.first(batch.values("history") + 1).sum() * self.second.weight.sum()}

    parallel = freescale.parallelize(
        Sneaky(nn.Embedding(10, 4)), {"first": ["history"]}, placement=placement
    )
    pipeline = freescale.Pipeline(parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"module 'first' was called with id 6, .* \(history\)"):
        list(pipeline.run([batch(4, 5)]))


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_ids_beyond_the_table_are_refused_in_forward_too(placement):
    class Wrapping(Pair):
        def forward(self, batch):
            return {
                "sum": self.first(batch.values("history") + 10).sum() * self.second.weight.sum()
            }

    parallel = freescale.parallelize(
        Wrapping(nn.Embedding(10, 4)), {"first": ["history"]}, placement=placement
    )
    pipeline = freescale.Pipeline(parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.1))
    with pytest.raises(ValueError, match="module 'first' was called with id 14"):
        list(pipeline.run([batch(4, 5)]))


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_int32_ids_read_the_same_rows(placement):
    table = nn.Embedding(100_000, 4)
    expected = table.weight.detach().clone()
    parallel = freescale.parallelize(
        Pair(table), {"first": ["history"]}, init="weights", placement=placement
    )
    parallel.tables.place()
    ids = torch.randint(0, 100_000, (500,), dtype=torch.int32)
    wanted = SequenceBatch(sequences={"history": Jagged(ids, torch.tensor([500]))})
    tables = parallel.tables
    tables.open(tables.set.fetch(tables.set.request([wanted]), train=False))
    assert torch.equal(parallel.module.first(ids), expected[ids.long()])
    assert torch.equal(parallel.module.first(ids.flip(0).clone()), expected[ids.long()].flip(0))


def test_reading_in_other_shapes_than_announced():
    """Ids that were announced may be asked for in any order and shape; gradients add up."""

    class Reordered(Pair):
        def forward(self, batch):
            ids = batch.values("history").flip(0).view(2, 2)
            again = self.first(ids.clone())
            return {"sum": (again * again).sum() * self.second.weight.sum() ** 0}

    parallel = freescale.parallelize(
        Reordered(nn.Embedding(10, 4)),
        {"first": ["history"]},
        freescale.SGD(lr=0.25),
        placement="sharded",
    )
    parallel.tables.place()
    ids, rows = parallel.tables.get_local_rows("first")
    before = rows[ids.argsort()].clone()
    pipeline = freescale.Pipeline(parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.0))
    list(pipeline.run([batch(1, 1, 5, 8)]))
    after = rows[ids.argsort()]
    expected = before.clone()
    expected[[5, 8]] *= 0.5
    expected[1] *= 0.0
    torch.testing.assert_close(after, expected)


def test_a_table_larger_than_memory_is_refused():
    parallel = freescale.parallelize(
        Pair(nn.Embedding(10**11, 64, device="meta"), nn.Linear(64, 1)), {"first": ["history"]}
    )
    with pytest.raises(
        ValueError,
        match=(
            r"GiB free \(the largest is 'first', 100,000,000,000 x "
            r"64\)"
        ),
    ):
        parallel.tables.place()


def test_weight_of_a_table_says_why_it_is_not_there():
    parallel = freescale.parallelize(Pair(nn.Embedding(10, 4)), {"first": ["history"]})
    with pytest.raises(RuntimeError, match="'first' is a sharded table and has no whole weight"):
        _ = parallel.module.first.weight
    with pytest.raises(RuntimeError, match="read outside a step"):
        parallel.module(batch(1))


def test_accumulation_and_recomputation_change_nothing():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(Clicks):
        def forward(self, batch):
            names = ("click", "like")
            return dict(
                zip(
                    names,
                    checkpoint(
                        lambda: tuple(Clicks.forward(self, batch).values()), use_reentrant=False
                    ),
                )
            )

    results = []
    for model, accumulate in ((Clicks(), 1), (Clicks(), 3), (Recomputed(), 1)):
        torch.manual_seed(0)
        for parameter in model.layers.parameters():
            nn.init.normal_(parameter)
        parallel = freescale.parallelize(
            model, Clicks.ids, freescale.Adam(lr=0.1), placement="sharded"
        )
        pipeline = freescale.Pipeline(
            parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.1), accumulate=accumulate
        )
        losses = [r.loss for r in pipeline.run([clicks_batch(7, s) for s in range(3)])]
        results.append((losses, parallel.tables.get_local_rows("item")[1]))
    for losses, rows in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-12)
        torch.testing.assert_close(rows, results[0][1], rtol=1e-9, atol=1e-12)


def test_the_batch_must_say_what_it_supervises():
    parallel = freescale.parallelize(Pair(nn.Embedding(10, 4)), {"first": ["history"]})
    pipeline = freescale.Pipeline(parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.1))
    nothing = SequenceBatch(sequences=batch(1).sequences)
    with pytest.raises(ValueError, match="the batch has no weights"):
        list(pipeline.run([nothing]))
    other = SequenceBatch(sequences=batch(1).sequences, weights={"other": torch.ones(1)})
    with pytest.raises(
        ValueError,
        match=(
            r"the model returned tasks \['sum'\], the batch has "
            r"weights for \['other'\]"
        ),
    ):
        list(pipeline.run([other]))
    with pytest.raises(ValueError, match="unknown schedule 'magic'"):
        freescale.Pipeline(
            parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.1), schedule="magic"
        )
