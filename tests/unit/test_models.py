"""HSTU and its heads: a sample's share of loss and gradient depends on that sample alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers.model_cases import (
    ACTIONS,
    COUNTS,
    ITEMS,
    LENGTHS,
    TASKS,
    WIDTH,
    assert_equal,
    batch_of,
    losses_and_gradients,
)
from torch import nn
from torch.nn import functional as F

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.models import HSTU, Ranking, Retrieval
from freescale.models.columns import locate_rows
from freescale.models.hstu_layer import project

UNBIASED = {"position_bias": False, "time_bias": False}


def encoder(**changes):
    options = {"dropout": 0.3, "position_bias": True, "time_bias": True, "num_time_buckets": 20}
    return HSTU(width=WIDTH, layers=2, heads=2, d_qk=3, d_v=5, max_length=12, **(options | changes))


def model_of(kind, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    if kind == "retrieval":
        model = Retrieval(encoder(**changes), num_items=ITEMS, num_actions=ACTIONS, temperature=0.3)
    else:
        model = Ranking(encoder(**changes), num_items=ITEMS, num_actions=ACTIONS, tasks=TASKS)
    return model.to(dtype).train()


def without(batch, name):
    return SequenceBatch(
        sequences={n: s for n, s in batch.sequences.items() if n != name},
        candidates=batch.candidates, dense=batch.dense, keys=batch.keys,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["retrieval", "ranking"])
class TestNeighbours:
    def test_a_batch_is_the_sum_of_its_samples(self, kind):
        model, batch = model_of(kind), batch_of()
        singles = [losses_and_gradients(model, batch.slice(i, i + 1)) for i in range(len(batch))]
        expected = {name: sum(s[name] for s in singles) for name in singles[0]}
        # nothing is left out of the comparison
        assert all(value.abs().max() > 0 for value in expected.values())
        for seed in range(3):
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
            assert_equal(losses_and_gradients(model, batch.select(order)), expected)
        halves = [losses_and_gradients(model, part) for part in batch.split([2, 4])]
        assert_equal({n: halves[0][n] + halves[1][n] for n in expected}, expected)

    def test_dropout_is_drawn_from_the_keys(self, kind):
        model, batch = model_of(kind), batch_of()
        first = losses_and_gradients(model, batch)
        again = losses_and_gradients(model, batch)
        assert all(torch.equal(first[n], again[n]) for n in first)
        other = SequenceBatch(batch.sequences, batch.candidates, batch.dense, keys=batch.keys + 1)
        name = next(iter(model(batch)))
        assert model(other)[name] != first[name]
        assert model.eval()(other)[name] == model(batch)[name] != first[name]
        with pytest.raises(ValueError, match="dropout needs keys"):
            model.train()(SequenceBatch(batch.sequences, batch.candidates, batch.dense))

    def test_checkpointing_gives_the_same_bits(self, kind):
        plain, saving = model_of(kind), model_of(kind, checkpoint=True)
        saving.load_state_dict(plain.state_dict())
        plain, saving = (losses_and_gradients(m, batch_of()) for m in (plain, saving))
        assert all(torch.equal(plain[n], saving[n]) for n in plain)

    @pytest.mark.parametrize(
        "lengths, counts",
        [
            pytest.param([], [], id="no samples"),
            pytest.param([0], [0], id="one empty sample"),
            pytest.param([0, 0], [2, 0], id="candidates alone"),
            pytest.param([0, 3], [0, 0], id="no candidates"),
        ],
    )
    def test_nothing_to_do(self, kind, lengths, counts):
        found = losses_and_gradients(model_of(kind), batch_of(lengths, counts))
        assert all(torch.isfinite(value).all() for value in found.values())
        if sum(lengths) + sum(counts) == 0:
            assert not any(value.any() for value in found.values())

    def test_tables_are_called_once_per_feature_with_the_batch_s_tensors(self, kind):
        model, batch = model_of(kind), batch_of()
        seen = {"item": [], "action": []}

        # no weight to touch, rows in float32 whatever the model's dtype
        class Elsewhere(nn.Module):
            def __init__(self, name, rows):
                super().__init__()
                self.name = name
                self.rows = rows

            def forward(self, ids):
                seen[self.name].append(ids)
                return self.rows[ids].float()

        for name in seen:
            setattr(model, name, Elsewhere(name, getattr(model, name).weight.detach()))
        model(batch)
        for name, features in model.features.items():
            assert len(seen[name]) == len(features)
            assert all(ids is batch.values(f) for ids, f in zip(seen[name], features, strict=True))

    @pytest.mark.parametrize(
        "how", ["float32", "to bfloat16", "to bfloat16, rows float32", "autocast"]
    )
    def test_lower_precision(self, kind, how):
        exact, batch = losses_and_gradients(model_of(kind), batch_of()), batch_of()
        model = model_of(kind, torch.bfloat16 if "bfloat16" in how else torch.float32)
        if "rows" in how:
            model.item.float()
            model.action.float()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            found = losses_and_gradients(model, batch)
        for name, value in found.items():
            parameter = dict(model.named_parameters()).get(name)
            assert value.dtype == (torch.float32 if parameter is None else parameter.dtype)
            error = (value.double() - exact[name]).norm() / exact[name].norm()
            assert error < (1e-4 if how == "float32" else 0.01 if parameter is None else 0.3), name

    def test_a_step_reads_no_device(self, kind, monkeypatch):
        """On the meta device there is nothing to read: all sizes must be known on the host, where
        the batch came from."""
        # not known of this device
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
        monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        model, batch = model_of(kind).to("meta"), batch_of()
        there = batch.to("meta")
        for part in (there, without(there, "candidate_timestamps"), there.slice(1, 4)):
            sum(model(part).values()).backward()
        with pytest.raises((RuntimeError, NotImplementedError)):
            model(batch.map(lambda tensor: tensor.to("meta")))  # forgot where it came from

    def test_bad_batches(self, kind):
        model, batch = model_of(kind), batch_of()
        with pytest.raises(ValueError, match="no sequence 'actions'"):
            model(without(batch, "actions"))
        with pytest.raises(ValueError, match="no sequence 'timestamps'"):
            model(without(batch, "timestamps"))
        turned = Jagged(batch.values("actions"), batch.sequences["history"].lengths.flip(0))
        wrong = dict(batch.sequences, actions=turned)
        with pytest.raises(ValueError, match="'actions' has 12 values in sample 0"):
            model(SequenceBatch(wrong, batch.candidates, batch.dense, keys=batch.keys))
        with pytest.raises(ValueError, match="max_length=12"):
            model(batch_of([13], [1]))

    def test_no_embedding_but_the_tables(self, kind):
        tables = [n for n, m in model_of(kind).named_modules() if isinstance(m, nn.Embedding)]
        assert tables == ["item", "action"] == list(model_of(kind).features)


def naive_retrieval_loss(model, batch):
    """The definition, one position at a time, on the encoder's outputs."""
    with torch.no_grad():
        outputs, start, total = model.encode_history(batch), 0, 0.0
        weights = batch.sequences.get("target_weights")

        def find(name, sample, position):
            if name in batch.sequences:
                return batch.sequences[name].values[position]
            return batch.shared[name] if name in batch.shared else batch.dense[name][sample]

        for sample, length in enumerate(batch.sequences["history"].lengths.tolist()):
            for position in range(start, start + length):
                target = int(batch.values("targets")[position])
                negatives = find("negatives", sample, position)
                ids = torch.cat([torch.tensor([target]), negatives[negatives != target]])
                rows = F.normalize(model.item.weight[ids], dim=1)
                logits = rows @ F.normalize(outputs[position], dim=0) / model.temperature
                if "targets_log_q" in batch:
                    log_q = find("negatives_log_q", sample, position)[negatives != target]
                    own = batch.values("targets_log_q")[position : position + 1]
                    logits -= torch.cat([own, log_q])
                weight = 1.0 if weights is None else float(weights.values[position])
                total += weight * float(torch.logsumexp(logits, 0) - logits[0])
            start += length
    return total


def with_negatives(batch, per, log_q=False):
    """The batch with negatives per position or for all, and log-q beside them."""
    history = batch.sequences["history"]
    tokens = history.values.numel()
    shape = {"sample": (len(batch),), "position": (tokens,), "batch": ()}[per] + (5,)
    generator = torch.Generator().manual_seed(1)
    columns = {"negatives": torch.randint(0, ITEMS, shape, generator=generator)}
    sequences = {n: s for n, s in batch.sequences.items() if n != "negatives"}
    if log_q:
        columns["negatives_log_q"] = torch.randn(shape, generator=generator)
        sequences["targets_log_q"] = Jagged(
            torch.randn(tokens, generator=generator), history.lengths
        )
    if per == "position":
        sequences |= {name: Jagged(value, history.lengths) for name, value in columns.items()}
    return SequenceBatch(
        sequences,
        dense=columns if per == "sample" else {},
        shared=columns if per == "batch" else {},
        keys=batch.keys,
    )


class TestRetrieval:
    @pytest.mark.parametrize("log_q", [False, True])
    @pytest.mark.parametrize("per", ["sample", "position", "batch"])
    def test_loss_equals_the_definition(self, per, log_q, monkeypatch):
        batch = with_negatives(batch_of(), per, log_q)
        negatives, targets = batch.values("negatives"), batch.values("targets")
        # a position whose negatives all are its target, and one that has it among them
        negatives.view(-1, 5)[-1 if per == "batch" else 3, :] = targets[8]
        negatives.view(-1, 5)[0, 2] = targets[1]
        if log_q:
            history = batch.sequences["history"]
            weights = Jagged(torch.arange(history.values.numel()) % 3 / 2.0, history.lengths)
            batch = replace(batch, sequences={**batch.sequences, "target_weights": weights})
        model = model_of("retrieval")
        expected = pytest.approx(naive_retrieval_loss(model, batch), rel=1e-12)
        assert float(model(batch)["next_item"].detach()) == expected
        monkeypatch.setattr("freescale.kernels.softmax.reference.BUDGET", 50)
        assert float(model(batch)["next_item"].detach()) == expected
        with torch.no_grad():
            assert float(model(batch)["next_item"]) == expected

    def test_any_module_that_maps_ids_to_rows_gets_the_same_gradients(self):
        model, batch = model_of("retrieval"), batch_of()
        expected = losses_and_gradients(model, batch)

        class Table(nn.Module):
            def __init__(self, weight):
                super().__init__()
                self.weight = weight

            def forward(self, ids):
                return self.weight[ids]

        model.item = Table(model.item.weight)
        assert_equal(losses_and_gradients(model, batch), expected)

    @pytest.mark.parametrize("per", ["position", "batch"])
    def test_a_batch_is_the_sum_of_its_samples(self, per):
        model, batch = model_of("retrieval"), with_negatives(batch_of(), per)
        whole = losses_and_gradients(model, batch)
        parts = [losses_and_gradients(model, part) for part in batch.split([2, 3, 1])]
        assert_equal(whole, {name: sum(part[name] for part in parts) for name in whole})

    def test_equal_ids_have_equal_indices(self):
        ids = (torch.tensor([4, 1, 4, 4]), torch.tensor([[1, 0], [9, 4]]))
        rows, found = locate_rows(nn.Sequential(nn.Embedding(10, 2)), *ids)
        assert [part.tolist() for part in found] == [[0, 1, 0, 0], [[1, 5], [6, 0]]]
        assert rows.shape == (8, 2)
        same = torch.full((3,), 7)
        assert locate_rows(nn.Sequential(nn.Embedding(10, 2)), same)[1][0].tolist() == [0, 0, 0]

    def test_bad_negatives(self):
        model, batch = model_of("retrieval"), with_negatives(batch_of(), "sample")
        with pytest.raises(ValueError, match="no feature 'negatives'"):
            model(replace(batch, dense={}))
        with pytest.raises(ValueError, match=r"per sample must be \[6, K\]"):
            model(replace(batch, dense={"negatives": batch.values("negatives")[:, 0]}))

    def test_queries_are_the_last_outputs(self):
        model, batch = model_of("retrieval").eval(), batch_of()
        queries = model.encode_queries(batch)
        assert queries.shape == (len(LENGTHS), WIDTH)
        for sample, length in enumerate(LENGTHS):
            if length == 0:
                assert not queries[sample].any()
            else:
                alone = F.normalize(
                    model.encode_history(batch.slice(sample, sample + 1))[-1], dim=0
                )
                torch.testing.assert_close(queries[sample], alone, rtol=1e-12, atol=1e-12)
        rows = model.encode_items(model.item.weight)
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(ITEMS, dtype=torch.float64))
        assert model.encode_queries(batch_of([], [])).shape == (0, WIDTH)
        assert not model.encode_queries(batch_of([0, 0], [0, 0])).any()

    def test_causal(self):
        """Changing the last event changes no earlier output."""
        model, batch = model_of("retrieval").eval(), batch_of([6], [0])
        before = model.encode_history(batch)
        batch.values("history")[5] = (batch.values("history")[5] + 1) % ITEMS
        after = model.encode_history(batch)
        assert torch.equal(before[:5], after[:5]) and not torch.equal(before[5], after[5])

    def test_without_options(self):
        torch.manual_seed(0)
        plain = HSTU(width=WIDTH, layers=1, heads=2, max_length=12, dropout=0.0, **UNBIASED)
        model = Retrieval(plain, num_items=ITEMS, normalize=False)
        assert model.features == {"item": ["history", "targets", "negatives"]}
        assert torch.equal(model.encode_items(model.item.weight), model.item.weight)
        assert model(batch_of())["next_item"] > 0

    def test_learns_a_cycle(self):
        """Items follow each other in a circle: some steps of Adam predict the next one."""
        torch.manual_seed(0)
        model = Retrieval(
            HSTU(width=16, layers=2, heads=2, max_length=8, dropout=0.1, **UNBIASED),
            num_items=12,
            temperature=0.1,
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        start = torch.randint(0, 12, (16, 1))
        items = ((start + torch.arange(9)) % 12)[:, :8].flatten()
        lengths = torch.full((16,), 8)
        for step in range(60):
            batch = SequenceBatch(
                {"history": Jagged(items, lengths), "targets": Jagged((items + 1) % 12, lengths)},
                dense={"negatives": torch.randint(0, 12, (16, 6))},
                keys=torch.arange(16) + 16 * step,
            )
            optimizer.zero_grad()
            (model(batch)["next_item"] / items.numel()).backward()
            optimizer.step()
        model.eval()
        best = (model.encode_queries(batch) @ model.encode_items(model.item.weight).T).argmax(1)
        assert torch.equal(best, (items.view(16, 8)[:, -1] + 1) % 12)


class TestRanking:
    def test_candidates_do_not_see_each_other(self):
        model, batch = model_of("ranking").eval(), batch_of([5], [6])
        every = model.predict(batch)
        assert every.shape == (6, 2) and ((every > 0) & (every < 1)).all()

        def some(index):
            nested, sequences = batch.candidates["candidates"], dict(batch.sequences)
            inner = nested.inner.select(index)
            counts = torch.tensor([len(index)])
            sequences["candidate_timestamps"] = Jagged(
                batch.values("candidate_timestamps")[index], counts
            )
            sequences["labels"] = Jagged(batch.values("labels")[index], counts)
            chosen = {"candidates": Nested(inner.values, inner.lengths, counts)}
            return model.predict(SequenceBatch(sequences, chosen, keys=batch.keys))

        for index in (
            torch.tensor([3, 0, 5, 1, 4, 2]),
            torch.tensor([0, 1, 3, 4, 5]),
            torch.tensor([4]),
        ):
            torch.testing.assert_close(some(index), every[index], rtol=1e-13, atol=1e-14)

    def test_a_candidate_is_judged_like_a_next_event_with_its_items_summed(self):
        """The same tokens through the encoder by hand, one candidate at a time."""
        model, batch = model_of("ranking").eval(), batch_of([5, 0, 1, 11, 3, 11])
        nested, history = batch.candidates["candidates"], batch.sequences["history"]
        rows, number = [], 0
        for sample, count in enumerate(COUNTS):
            part = history.slice(sample, sample + 1).values
            actions = batch.sequences["actions"].slice(sample, sample + 1).values
            times = batch.sequences["timestamps"].slice(sample, sample + 1).values
            for _ in range(count):
                items = nested.inner.slice(number, number + 1).values
                token = model.item(items).sum(0, keepdim=True)
                x = torch.cat([model.item(part) + model.action(actions), token])
                when = torch.cat([times, batch.values("candidate_timestamps")[number : number + 1]])
                out = model.encoder(x, torch.tensor([len(x)]), timestamps=when)
                rows.append(torch.sigmoid(model.judge(out[-1])))
                number += 1
        expected = torch.stack(rows)
        torch.testing.assert_close(model.predict(batch), expected, rtol=1e-12, atol=1e-13)
        labels = batch.values("labels").double()
        for task, loss in model(batch).items():
            column = TASKS.index(task)
            oracle = F.binary_cross_entropy(expected[:, column], labels[:, column], reduction="sum")
            torch.testing.assert_close(loss, oracle, rtol=1e-12, atol=0)

    def test_without_times_a_candidate_has_that_of_the_last_event(self):
        model, batch = model_of("ranking").eval(), batch_of()
        times, history = batch.values("timestamps"), batch.sequences["history"]
        last = [
            int(times[o - 1]) if n else 0
            for n, o in zip(LENGTHS, history.offsets[1:].tolist(), strict=True)
        ]
        same = torch.repeat_interleave(torch.tensor(last), torch.tensor(COUNTS))
        given = dict(batch.sequences, candidate_timestamps=Jagged(same, torch.tensor(COUNTS)))
        expected = model.predict(SequenceBatch(given, batch.candidates, keys=batch.keys))
        assert torch.equal(model.predict(without(batch, "candidate_timestamps")), expected)
        assert not torch.equal(model.predict(batch), expected)
        empty = without(batch_of([0, 0], [1, 2]), "candidate_timestamps")
        assert model.predict(empty).shape == (3, 2)


class TestEncoder:
    def test_bad_options(self):
        for wrong, message in [
            ({"dropout": 1.0}, "dropout"),
            ({"layers": 0}, "layers"),
            ({"heads": 0}, "heads"),
        ]:
            with pytest.raises(ValueError, match=message):
                HSTU(**({"width": 8, "layers": 1, "heads": 2, "max_length": 4} | wrong))

    def test_dropout_scales_and_differs_by_token_and_layer(self):
        torch.manual_seed(0)
        module = HSTU(
            width=16, layers=2, heads=2, max_length=100, dropout=0.25, input_dropout=0.0, **UNBIASED
        ).double()
        x, lengths, keys = (
            torch.randn(150, 16, dtype=torch.float64),
            torch.tensor([100, 50]),
            torch.tensor([1, 2]),
        )
        seen = []
        for layer in module.layers:
            # every layer's input is x, with dropout and without
            nn.init.zeros_(layer.output.weight)
            layer.output.register_forward_pre_hook(
                lambda _, inputs: seen.append(inputs[0].detach())
            )
        module(x, lengths, keys)
        module.eval()(x, lengths, keys)
        kept = [seen[0] / seen[2], seen[1] / seen[3]]  # by layer
        for share in kept:
            torch.testing.assert_close(
                share[share != 0], torch.full_like(share[share != 0], 1 / 0.75)
            )
            assert 0.7 < (share != 0).double().mean() < 0.8
            assert len({tuple(row) for row in (share != 0).int().tolist()}) > 100
        # independent: 2 * 0.75 * 0.25
        assert ((kept[0] != 0) != (kept[1] != 0)).double().mean() > 0.3

    def test_seed_decides_the_parameters(self):
        first, second = model_of("ranking"), model_of("ranking")
        assert all(
            torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
        )

    @pytest.mark.parametrize("tokens", [0, 3, 40])
    def test_a_served_projection_is_that_of_training(self, tokens):
        linear, x = (
            torch.nn.Linear(8, 20, dtype=torch.float64),
            torch.randn(tokens, 8, dtype=torch.float64),
        )
        with torch.no_grad():
            torch.testing.assert_close(project(linear, x), linear(x), rtol=1e-12, atol=1e-12)
        assert torch.equal(project(linear, x), linear(x))

    def test_attention_scale_is_the_configured_length(self):
        """Two models that differ in max_length only differ in outputs: nothing is divided by the
        batch's lengths."""
        torch.manual_seed(0)
        short = HSTU(width=WIDTH, layers=1, heads=2, max_length=12, dropout=0.0, **UNBIASED)
        long = HSTU(width=WIDTH, layers=1, heads=2, max_length=24, dropout=0.0, **UNBIASED)
        state = copy.deepcopy(short.state_dict())
        state["position"] = torch.cat([state["position"], torch.zeros(12, WIDTH)])
        long.load_state_dict(state)
        # float64: one call for a whole layer would show nothing of its inside
        x, lengths = torch.randn(12, WIDTH).double(), torch.tensor([5, 7])
        captured = {}
        for name, module in (("short", short), ("long", long)):
            hook = module.layers[0].attention_norm.register_forward_pre_hook(
                lambda _, inputs, name=name: captured.__setitem__(name, inputs[0])
            )
            module.double()(x, lengths)
            hook.remove()
        torch.testing.assert_close(captured["short"], 2 * captured["long"])
