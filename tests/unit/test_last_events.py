"""Queries from the last event alone against those of the whole encoder."""

from __future__ import annotations

import pytest
import torch

from freescale.batch import Jagged, SequenceBatch
from freescale.models import HSTU, Retrieval, SASRec
from freescale.visible import Visible

SHAPE = {"width": 16, "layers": 2, "heads": 2, "max_length": 50}


def make_batch(lengths: list[int]) -> SequenceBatch:
    counts, generator = torch.tensor(lengths), torch.Generator().manual_seed(0)
    events = int(counts.sum())
    items = torch.randint(0, 30, (events,), generator=generator)
    gaps = torch.randint(0, 5000, (events,), generator=generator)
    sequences = {"history": Jagged(items, counts), "timestamps": Jagged(gaps.cumsum(0), counts)}
    return SequenceBatch(sequences)


ENCODERS = {
    "both biases": lambda: HSTU(**SHAPE),
    "no bias": lambda: HSTU(**SHAPE, position_bias=False, time_bias=False),
    "time": lambda: HSTU(**SHAPE, position_bias=False),
    "other widths": lambda: HSTU(**SHAPE, d_qk=3, d_v=5),
    "sasrec": lambda: SASRec(**SHAPE),
    "semi-local": lambda: HSTU(**SHAPE, visible=Visible(3, 6)),
}


@pytest.mark.parametrize("lengths", [[50, 0, 7, 33], [0, 1], [0, 0], [2, 3]])
@pytest.mark.parametrize("kind", ENCODERS)
def test_equals_the_whole_encoder(kind, lengths, monkeypatch):
    """As for long histories: short ones have kernels for whole layers."""
    monkeypatch.setattr("freescale.models.hstu.fits_fused_layer", lambda *given: False)
    torch.manual_seed(0)
    model = Retrieval(ENCODERS[kind](), num_items=30).eval()
    batch = make_batch(lengths)
    with torch.no_grad():
        expected = model.encode_queries(batch)
        found = model.encode_queries(batch, last_alone=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert found[[n for n, length in enumerate(lengths) if not length]].eq(0).all()


def test_the_last_layer_computes_nothing_else(monkeypatch):
    """Long histories on a CPU; in training mode, with its dropout, all is computed."""
    model = Retrieval(HSTU(**SHAPE, dropout=0.1), num_items=30).eval()
    whole = model.encoder.layers[-1].forward
    monkeypatch.setattr("freescale.models.hstu.fits_fused_layer", lambda *given: False)
    monkeypatch.setattr(model.encoder.layers[-1], "forward", lambda *given: pytest.fail("called"))
    with torch.no_grad():
        model.encode_queries(make_batch([50, 3]), last_alone=True)
    monkeypatch.setattr(model.encoder.layers[-1], "forward", whole)
    model.train()
    batch = make_batch([50, 3])
    keyed = SequenceBatch(batch.sequences, keys=torch.arange(2))
    found = model.encode_queries(keyed, last_alone=True)
    assert torch.equal(found, model.encode_queries(keyed))
