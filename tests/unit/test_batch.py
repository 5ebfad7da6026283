"""Batches against plain Python lists."""

from __future__ import annotations

import pytest
import torch
from helpers.histories import build_batch, list_samples, samples
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.batch import Jagged, SequenceBatch, check_is_batch


@settings(deadline=None)
@given(samples, st.data())
def test_select(items, data):
    index = data.draw(st.lists(st.integers(0, len(items) - 1), max_size=9)) if items else []
    chosen = build_batch(items).select(torch.tensor(index, dtype=torch.int64))
    assert list_samples(chosen) == [items[i] for i in index]
    assert chosen.number == 7


@settings(deadline=None)
@given(samples, st.data())
def test_split_and_concat(items, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=3)))
    edges = [0, *cuts, len(items)]
    parts = build_batch(items).split([b - a for a, b in zip(edges, edges[1:])])
    assert [list_samples(part) for part in parts] == [items[a:b] for a, b in zip(edges, edges[1:])]
    assert list_samples(SequenceBatch.concat(parts)) == items


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="differ in their number of samples"):
        SequenceBatch(dense={"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="lengths add up to 3, but there are 2 values"):
        SequenceBatch(sequences={"h": Jagged(torch.zeros(2), torch.tensor([1, 2]))}).check()
    with pytest.raises(ValueError, match="negative length"):
        SequenceBatch(sequences={"h": Jagged(torch.zeros(2), torch.tensor([3, -1]))}).check()
    with pytest.raises(ValueError, match="1-d int64"):
        Jagged(torch.zeros(2), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="no feature 'x'; it has h"):
        SequenceBatch(sequences={"h": Jagged(torch.zeros(2), torch.tensor([2]))}).values("x")
    with pytest.raises(ValueError, match="split sizes"):
        build_batch([]).split([1])
    with pytest.raises(ValueError, match="differ in their features"):
        SequenceBatch.concat([build_batch([]), SequenceBatch(dense={"a": torch.zeros(0)})])


def test_features_that_moved_remember_the_host():
    """On the meta device nothing can be read: sizes must come from where the batch was."""
    batch = build_batch(
        [
            {"history": [1, 2], "candidates": [[1], []], "label": 1, "key": 1},
            {"history": [], "candidates": [[2, 3]], "label": 0, "key": 2},
        ]
    )
    there = batch.to("meta")
    history, nested = there.sequences["history"], there.candidates["candidates"]
    assert history.host is batch.sequences["history"] and history.host_lengths.tolist() == [2, 0]
    assert nested.outer.host_lengths.tolist() == [2, 1] and nested.inner.host_lengths.tolist() == [
        1,
        0,
        2,
    ]
    assert there.to("meta").sequences["history"].host is history.host
    last = there.slice(1, 2)
    assert last.sequences["history"].host_lengths.tolist() == [0] and last.sequences[
        "history"
    ].values.shape == (0,)
    assert (
        last.candidates["candidates"].inner.host_lengths.tolist() == [2]
        and last.device.type == "meta"
    )
    assert (
        batch.sequences["history"].host is None
        and batch.sequences["history"].host_lengths is batch.sequences["history"].lengths
    )


def test_what_the_batch_shares_stays_whole():
    shared = {"negatives": torch.tensor([4, 5]), "bias": torch.ones(2, 3)}
    lengths = torch.tensor([1, 2])
    batch = SequenceBatch({"history": Jagged(torch.arange(3), lengths)}, shared=shared)
    assert len(batch) == 2 and "bias" in batch and batch.values("negatives") is shared["negatives"]
    for part in (batch.select(torch.tensor([1])), batch.slice(0, 0), *batch.split([1, 1])):
        assert part.values("negatives") is shared["negatives"]
    assert SequenceBatch.concat(batch.split([1, 1])).shared == shared
    tensors = batch.tensors()
    assert [len(t) for t in tensors] == [2, 3, 2, 2]  # lengths and values first
    assert torch.equal(batch.with_tensors(tensors).values("bias"), shared["bias"])
    doubled = batch.map(lambda t: 2 * t)
    assert doubled.values("negatives").tolist() == [8, 10]
    assert batch.to("meta").values("bias").device.type == "meta"
    with pytest.raises(ValueError, match="differ in their shared features"):
        SequenceBatch.concat([batch, doubled])
    with pytest.raises(ValueError, match="single number"):
        SequenceBatch(shared={"one": torch.tensor(1)})
    with pytest.raises(ValueError, match="several devices"):
        check_is_batch(SequenceBatch(batch.sequences, shared=batch.to("meta").shared))


@settings(deadline=None)
@given(samples)
def test_a_packed_batch_is_the_batch(items):
    """One aligned buffer; what moves, or is packed again, is views of one buffer too."""
    batch = build_batch(items)
    packed = batch.pack()
    assert list_samples(packed) == items and packed.number == batch.number
    assert packed.packed is not None and packed.pack() is packed
    start, end = packed.packed.data_ptr(), packed.packed.data_ptr() + packed.packed.numel()
    for tensor, other in zip(packed.tensors(), batch.tensors(), strict=True):
        assert tensor.dtype == other.dtype and torch.equal(tensor, other)
        assert not tensor.numel() or start <= tensor.data_ptr() < end
        assert (tensor.data_ptr() - start) % 16 == 0 or not tensor.numel()
    moved = packed.to("meta")
    assert moved.packed is not None and moved.packed.shape == packed.packed.shape
    assert [t.shape for t in moved.tensors()] == [t.shape for t in batch.tensors()]
    assert moved.sequences["history"].host is packed.sequences["history"]
    # what is taken out of it lies elsewhere
    assert packed.slice(0, 0).packed is None and packed.map(torch.clone).packed is None


@pytest.mark.parametrize("samples", [0, 1])
def test_packing_does_not_ask_for_strides_that_mean_nothing(samples):
    """Tensors with one element or none are contiguous, whatever their strides are."""
    every_other = torch.arange(12).view(6, 2)[:samples, 1]
    repeated = torch.ones(1).expand(samples)
    packed = SequenceBatch(dense={"a": every_other, "b": repeated}).pack()
    assert packed.dense["a"].tolist() == [1] * samples == packed.dense["b"].tolist()


def test_packing_keeps_what_columns_share():
    lengths, values = torch.tensor([2, 1]), torch.tensor([5, 9, 3])
    batch = SequenceBatch(
        {"history": Jagged(values, lengths), "timestamps": Jagged(values + 1, lengths, span=4)}
    )
    for packed in (batch.pack(), batch.pack().to("meta")):
        history, times = packed.sequences["history"], packed.sequences["timestamps"]
        assert history.lengths is times.lengths and times.span == 4
    assert packed.packed.numel() == 16 + 32 + 32
