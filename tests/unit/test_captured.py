"""Batches padded to a fixed size, as CUDA graphs need them: what fills them changes no result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.batch import Jagged, SequenceBatch
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.pipeline.captured.graphs import StaticBatch, can_pad
from freescale.pipeline.captured.sizes import choose_size, pad_lengths
from freescale.random import derive

LONGEST = 40


@given(st.lists(st.integers(0, 300), min_size=1, max_size=50), st.integers(16, 300))
def test_filling_samples_make_up_the_size(lengths: list[int], longest: int) -> None:
    size = choose_size(len(lengths), sum(lengths), longest)
    padded = pad_lengths(np.array(lengths, np.int64), size)
    assert padded[: len(lengths)].tolist() == lengths
    assert len(padded) == size.samples and padded.sum() == size.tokens
    assert padded[len(lengths) :].max() <= min(64, longest)
    assert size.tokens - sum(lengths) <= max(64, sum(lengths) // 8)


def test_batches_of_about_the_same_size_share_one() -> None:
    sizes = {choose_size(256, tokens, 200) for tokens in range(26_000, 33_000, 50)}
    assert len(sizes) == 5


def make_batch(seed: int, tokens: int) -> SequenceBatch:
    """Five samples, one of them empty, on their way from the host."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 0, 12, 1, tokens - 20])
    history, targets = (torch.randint(0, 50, (tokens,), generator=generator) for _ in range(2))
    batch = SequenceBatch(
        sequences={"history": Jagged(history, lengths), "targets": Jagged(targets, lengths)},
        dense={"negatives": torch.randint(0, 50, (5, 6), generator=generator)},
        weights={"next_item": lengths.float()},
        keys=derive(seed, torch.arange(5)),
        number=seed,
    )
    return replace(
        batch,
        sequences={n: replace(part, host=part) for n, part in batch.sequences.items()},
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_padded_batch_trains_what_the_batch_does(dropout: float) -> None:
    torch.manual_seed(0)
    encoder = HSTU(
        width=8, layers=2, heads=2, max_length=LONGEST, dropout=dropout,
        position_bias=False, time_bias=False,
    )  # fmt: skip
    model = Retrieval(encoder, num_items=50).double()

    def differentiate(batch: SequenceBatch) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(batch)["next_item"]
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    first, second = make_batch(1, 57), make_batch(2, 50)
    size = choose_size(5, 57, LONGEST)
    assert size == choose_size(5, 50, LONGEST) and can_pad(first)
    static = StaticBatch(size, first, LONGEST)
    place = static.batch.sequences["history"].values.data_ptr()
    for batch in (first, second):
        static.fill(batch)
        assert static.batch.sequences["history"].values.data_ptr() == place
        filling = static.batch.sequences["history"].values[int(batch.weights["next_item"].sum()) :]
        assert (filling == -1).all()  # no row
        # plain tables have a row for every id: any will do for what weighs nothing
        sequences = {
            name: replace(part, values=part.values.clamp(min=0))
            for name, part in static.batch.sequences.items()
        }
        dense = {name: part.clamp(min=0) for name, part in static.batch.dense.items()}
        padded = replace(static.batch, sequences=sequences, dense=dense)
        for one, other in zip(differentiate(padded), differentiate(batch), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_batches_with_features_of_other_lengths_are_not_padded() -> None:
    batch = make_batch(1, 57)
    other = Jagged(torch.zeros(3), torch.tensor([1, 0, 1, 0, 1]))
    other = replace(other, host=other)
    assert not can_pad(replace(batch, sequences={**batch.sequences, "other": other}))
