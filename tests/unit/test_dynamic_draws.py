"""How probable ids are as in-batch negatives: counts over the batches are those of a dictionary,
on every number of owners, and what they estimate is the share that the data has."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from helpers.collisions import batch_of
from helpers.dynamic_oracle import FineDynamic
from helpers.dynamic_streams import CHURN, build
from helpers.loading import load_histories
from helpers.toys import Clicks
from hypothesis import given, settings
from hypothesis import strategies as st

import freescale
from freescale.batch import Jagged, SequenceBatch
from freescale.config import RunConfig
from freescale.embedding.dynamic.draws import MOST_BUCKETS, SAMPLE, DrawCounts
from freescale.embedding.dynamic_rules import SHARDS
from freescale.embedding.groups.local import InPlaceRows
from freescale.embedding.layout import TableSpec, compute_keys
from freescale.embedding.request import list_ids
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.pipeline.staged import Staged
from freescale.train.build import parse_tables
from freescale.transport.local import LocalTransport


def keys_of(ids):
    return compute_keys(torch.tensor(list(ids), dtype=torch.int64))


WORTH = st.dictionaries(st.integers(-50, 50), st.integers(0, 3 * SAMPLE), max_size=40)


@given(stream=st.lists(WORTH, min_size=1, max_size=6), cut=st.integers(0, SHARDS))
@settings(max_examples=30, deadline=None)
def test_counts_are_those_of_a_dictionary_and_can_be_taken_back(stream, cut):
    """One owner, or two that have divided the shards; the buckets of 101 ids are all different."""
    rules = FineDynamic(16 * SHARDS)
    whole = DrawCounts(rules, 0, SHARDS)
    parts = [DrawCounts(rules, 0, cut), DrawCounts(rules, cut, SHARDS)]
    total: Counter[int] = Counter()
    for batch in stream:
        keys, worth = keys_of(batch), torch.tensor(list(batch.values()), dtype=torch.int64)
        before = whole.sums.clone()
        # some of it from another requester
        draws = whole.add(torch.cat([keys, keys]), torch.cat([worth - worth // 3, worth // 3]))
        after = whole.sums.clone()
        whole.take_back(draws)
        assert torch.equal(whole.sums, before)
        whole.apply(draws)
        assert torch.equal(whole.sums, after)
        upper = (keys >> 52) + SHARDS // 2 >= cut
        for part, mine in zip(parts, (~upper, upper)):
            part.add(keys[mine], worth[mine])
        assert torch.equal(torch.cat([part.sums for part in parts]), whole.sums)
        total.update(batch)
    expected = np.log(np.maximum([total[id] for id in range(-50, 51)], 1)).astype(np.float32)
    assert np.array_equal(whole.estimate(keys_of(range(-50, 51))).numpy(), expected)


def test_ids_that_share_buckets_look_more_probable_and_the_room_is_bounded():
    counts = DrawCounts(freescale.Dynamic(10**6 * SHARDS), 0, SHARDS)
    assert counts.sums.nbytes == SHARDS * 2 * MOST_BUCKETS * 8
    rules = freescale.Dynamic(1)
    small = DrawCounts(rules, 0, rules.shards)  # all ids of a 4,096th share theirs
    ids = range(20_000)
    worth = torch.arange(1, 20_001)
    small.add(keys_of(ids), worth)
    found = small.estimate(keys_of(ids))
    assert (found >= worth.double().log().float()).all()
    shards: Counter[int] = Counter()
    for key, each in zip(keys_of(ids).tolist(), worth.tolist()):
        shards[key >> 52] += each
    expected = [np.float32(np.log(shards[key >> 52])) for key in keys_of(ids).tolist()]
    assert found.tolist() == expected


def test_an_id_is_worth_its_share_of_the_sample():
    rules = freescale.Dynamic(4096, draws="targets")
    spec = TableSpec("item", 4096, 4, torch.float32, ("history", "targets"), None, rules)
    history = Jagged(torch.tensor([1, 2, 3, 4]), torch.tensor([3, 0, 1]))
    targets = Jagged(torch.tensor([2, 3, 9, 5]), torch.tensor([3, 0, 1]))
    batch = SequenceBatch({"history": history, "targets": targets}, keys=torch.arange(3))
    worth = list_ids([batch], [spec]).draws
    assert worth.tolist() == [0] * 4 + [SAMPLE // 3] * 3 + [SAMPLE]


def test_after_an_epoch_they_are_the_shares_that_the_file_has(tmp_path):
    """`share_targets` counts them exactly, in a catalogue that it can hold."""
    generator = np.random.default_rng(3)
    lengths = generator.integers(2, 9, 60)
    items = [(generator.zipf(1.5, n) % 30).tolist() for n in lengths]
    path = tmp_path / "h.parquet"
    columns = {
        "user_id": range(60),
        "item_id": items,
        "timestamp": [list(range(n)) for n in lengths],
    }
    pq.write_table(pa.table({k: pa.array(list(v)) for k, v in columns.items()}), path)
    options = {"in_batch_share": 1.0, "count": 4, "per": "batch"}
    data = load_histories(path, 8, any_ids=True, **options)
    rules = parse_tables(
        RunConfig.from_settings(
            {"data": str(path), "rows": "item=dynamic:8192", "in_batch_share": 1.0}
        )
    )
    assert rules["item"].draws == "targets"
    torch.manual_seed(0)
    encoder = HSTU(width=8, layers=1, heads=1, max_length=10)
    model = Retrieval(encoder, num_items=1, table_device="meta")
    sharded = freescale.parallelize(model, model.features, tables=rules, transport=LocalTransport())
    pipeline = freescale.Pipeline(sharded, torch.optim.SGD(sharded.dense_parameters(), lr=0.1))
    list(pipeline.run(data))
    pipeline.close()
    counts = sharded.tables.get_group("item").rows.draws
    shares, _ = load_histories(path, 8, **options)._reader.share_targets()
    asked = [item for item in range(30) if shares[item] > 0]
    found = np.exp(counts.estimate(keys_of(asked)).numpy().astype(np.float64)) / SAMPLE / 60
    np.testing.assert_allclose(found, shares[asked], rtol=1e-5)


def test_the_loss_subtracts_them():
    """Retrieval on a table that counts draws, beside the same batch with columns of log-q."""
    rules = {"item": freescale.Dynamic(4096 * 8, draws="targets")}
    generator = torch.Generator().manual_seed(1)
    batches = [make_batch(number, generator) for number in range(3)]
    losses = []
    for schedule, corrected in (("serial", False), (Staged, False), ("serial", True)):
        torch.manual_seed(0)
        encoder = HSTU(width=8, layers=1, heads=1, max_length=10)
        model = Retrieval(encoder, num_items=1, table_device="meta")
        tables = {"item": freescale.Dynamic(4096 * 8)} if corrected else rules
        given = [add_log_q(batches, n) for n in range(3)] if corrected else batches
        sharded = freescale.parallelize(
            model, model.features, tables=tables, transport=LocalTransport()
        )
        dense = torch.optim.SGD(sharded.dense_parameters(), lr=0.1)
        pipeline = freescale.Pipeline(sharded, dense, schedule=schedule)
        losses.append([result.loss for result in pipeline.run(given)])
        pipeline.close()
    assert losses[0] == losses[1] == losses[2]
    uncorrected = freescale.Dynamic(4096 * 8)
    assert rules["item"].describe() != uncorrected.describe()


def make_batch(number, generator) -> SequenceBatch:
    lengths = torch.tensor([4, 0, 3, 1])
    draw = lambda *shape: torch.randint(-6, 6, shape, generator=generator) ** 3  # noqa: E731
    return SequenceBatch(
        sequences={
            "history": Jagged(draw(8), lengths),
            "targets": Jagged(draw(8), lengths),
            "timestamps": Jagged(torch.arange(8), lengths),
        },
        dense={"negatives": draw(4, 5)},
        weights={"next_item": lengths.float()},
        keys=torch.arange(4),
        number=number,
    )


def add_log_q(batches, number) -> SequenceBatch:
    """With what the batches up to this one say."""
    worth: dict[int, int] = Counter()
    for batch in batches[: number + 1]:
        targets = batch.sequences["targets"]
        for part in targets.values.split(targets.lengths.tolist()):
            worth.update({id: SAMPLE // len(part) * n for id, n in Counter(part.tolist()).items()})
    batch = batches[number]

    def log_q(ids):
        found = [np.log(max(1, worth[id])) for id in ids.reshape(-1).tolist()]
        return torch.tensor(found, dtype=torch.float32).view(ids.shape)

    targets = batch.sequences["targets"]
    columns = {"targets_log_q": Jagged(log_q(targets.values), targets.lengths)}
    dense = {"negatives_log_q": log_q(batch.dense["negatives"])}
    sequences, dense = dict(batch.sequences) | columns, dict(batch.dense) | dense
    return SequenceBatch(sequences, {}, dense, batch.weights, batch.keys, number)


def test_rows_that_are_read_in_the_table_itself():
    given = [(0, torch.tensor([7, 8, 7])), (0, torch.tensor([9]))]
    keys = compute_keys(torch.tensor([7, 8, 7, 9]))
    storage = SimpleNamespace(weight=torch.zeros(4, 2))
    find_keys = lambda _, ids: compute_keys(ids)  # noqa: E731
    slots, log_q = torch.tensor([2, 0, 2, 1]), torch.tensor([0.5, 1.5, 0.5, 2.5])
    rows = InPlaceRows(given, keys, storage, find_keys, slots, log_q)
    assert rows.find_log_q(0, given[0][1]).tolist() == [0.5, 1.5, 0.5]
    assert rows.find_log_q(0, given[1][1]).tolist() == [2.5]
    others = torch.tensor([[9, 7, 8, 7]])
    assert rows.find_log_q(0, others).tolist() == [[2.5, 0.5, 1.5, 0.5]]


def test_a_table_that_counts_nothing_has_none():
    parallel, pipeline = build(LocalTransport(), "serial", freescale.Dynamic(4096), model=Clicks)
    for _ in pipeline.run([batch_of(CHURN[0], 0)]):
        pass
    assert parallel.module.item.find_log_q(torch.tensor(CHURN[0])) is None
