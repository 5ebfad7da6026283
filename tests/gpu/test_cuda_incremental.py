"""Histories that grow by appended events, on a GPU: against computing them anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.feature_cases import ITEMS, TABLES, make_batch, make_encoder

from freescale.models import Retrieval, append_events, start_histories

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_appended_events_equal_computing_anew(kind, device="cuda"):
    torch.manual_seed(0)
    tables = replace(TABLES, context=0)
    model = Retrieval(make_encoder(kind), num_items=ITEMS, feature_tables=tables).to(device).eval()
    states = start_histories(model, make_batch(0, "sample"))
    for seed in range(1, 4):
        queries = append_events(model, states, make_batch(seed, "sample"))
    with torch.no_grad():
        expected = torch.cat([model.encode_queries(state.events) for state in states])
    assert any(state.rebuilds for state in states)
    torch.testing.assert_close(queries, expected, rtol=1e-4, atol=1e-5)
