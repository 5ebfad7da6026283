"""Packed samples against plain lists: every feature arrives whole, in order, whatever the parts."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.histories import build_batch, list_samples, samples
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale import batch_codec
from freescale.batch import Jagged, SequenceBatch
from freescale.batch_codec import build_empty_batch, describe_schema, pack, unpack


@settings(deadline=None)
@given(samples, samples, st.data())
def test_parts_arrive_as_they_were_sent(items, others, data):
    """Two senders, up to three receivers; whoever unpacks needs the features alone, an empty batch
    will do."""
    order = data.draw(st.permutations(range(len(items))))
    first = data.draw(st.integers(0, len(items)))
    counts = [first, 0, len(items) - first]
    long = data.draw(st.sampled_from([0, batch_codec._LONG]))  # 0: every sample counts as long
    with patch.object(batch_codec, "_LONG", long):
        message, sizes, lengths = pack(build_batch(items), np.array(order, np.int64), counts)
    assert (
        message.dtype == torch.uint8 and message.numel() == sum(lengths) and not message.numel() % 8
    )
    theirs, their_sizes, _ = pack(build_batch(others), np.arange(len(others)), [len(others)])
    parts = message.split(lengths)
    for part, (start, count) in enumerate(zip([0, first, first], counts, strict=True)):
        joined = torch.cat([parts[part], theirs])
        received = unpack(build_batch([]), joined, np.stack([sizes[part], their_sizes[0]]))
        assert list_samples(received) == [items[i] for i in order[start : start + count]] + others


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int32, torch.uint8]
)
@pytest.mark.parametrize("long", [0, batch_codec._LONG])
def test_dtypes_and_shapes(dtype, long, monkeypatch):
    monkeypatch.setattr(batch_codec, "_LONG", long)
    side = torch.arange(24).view(4, 3, 2)[:, :, 0].to(dtype)  # not contiguous
    batch = SequenceBatch(
        sequences={"side": Jagged(side, torch.tensor([3, 0, 1]))}, dense={"label": side[:3, 0]}
    )
    message, sizes, _ = pack(batch, np.array([2, 0, 1]), [2, 1])
    received = unpack(batch, message, sizes)
    assert received.sequences["side"].lengths.tolist() == [1, 3, 0]
    assert torch.equal(received.sequences["side"].values, side[[3, 0, 1, 2]])
    assert received.dense["label"].dtype == dtype and torch.equal(
        received.dense["label"], side[[2, 0, 1], 0]
    )


def test_what_does_not_fit_is_refused():
    batch = build_batch([{"history": [1, 2], "candidates": [[3]], "label": True, "key": 1}])
    message, sizes, _ = pack(batch, np.arange(1), [1])
    for damaged in (message[:-8], message[:8], message.float()):
        with pytest.raises(ValueError, match="were announced"):
            unpack(batch, damaged, sizes)
    with pytest.raises(ValueError, match="do not fit a batch"):
        unpack(batch, message, sizes[:, :-1])


def test_a_rank_without_data_learns_the_features_from_the_others():
    items = [{"history": [1, 2], "candidates": [[3], []], "label": True, "key": 1}]
    batch = build_batch(items)
    like = build_empty_batch(describe_schema(batch))
    assert len(like) == 0 and describe_schema(like) == describe_schema(batch) != ""
    message, sizes, _ = pack(batch, np.arange(1), [1])
    assert list_samples(unpack(like, message, sizes)) == items
    assert describe_schema(SequenceBatch()) == "" and not build_empty_batch("").parts()
