"""Histories that grow by appended events, on a GPU: against computing them anew, and single events
in a CUDA graph against the path of several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.feature_cases import ITEMS, TABLES, make_batch, make_encoder
from helpers.incremental_cases import CASES, Pair, make_model

from freescale.models import Retrieval, append_events, start_histories
from freescale.models.incremental import one_event

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


@pytest.mark.parametrize("case", CASES)
def test_single_events_equal_the_path_of_several(case):
    """Memory that doubles, full histories, 1 to 5 users; weights that change in place, and that
    move."""
    model = make_model(longest=300, **CASES[case]).cuda()
    pair = Pair(model, [3, 0, 60, 126, 290], "cuda")
    for step in range(200):
        if step == 100:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            graphs = _list_graphs(model)
        if step == 101:
            assert graphs and _list_graphs(model) == graphs
        if step == 150:
            last = model.encoder.layers[1].output
            last.weight = torch.nn.Parameter(last.weight * 1.5)
        worst = pair.append([1] * (5 if step % 10 < 6 else step % 4 + 1))
        assert all(error < 1e-5 for error in worst.values()), (step, worst)  # NaN fails
        if step == 150:
            assert not _list_graphs(model)
    assert len(_list_graphs(model)) == 4  # of 1, 2, 4 and 8 users
    assert pair.fast[-1].rebuilds == 2 and pair.fast[0].capacity == 256


def test_repeated_appends_have_the_same_bits():
    """Also while an earlier one is still under way: nothing is read from the device."""
    found = []
    for _ in range(2):
        model = make_model(longest=300, width=64).cuda()
        pair = Pair(model, [200, 20], "cuda")
        events = [pair.draw([1, 1]) for _ in range(50)]
        found.append(torch.stack([append_events(model, pair.fast, each) for each in events]))
    assert torch.equal(*found)
    for each in events:
        expected = append_events(model, pair.plain, each.to("cuda"))
    torch.testing.assert_close(found[0][-1], expected, rtol=1e-5, atol=1e-5)


def _list_graphs(model):
    steps = one_event._graphs[model].steps.values()
    return [step._graph for step in steps if step._graph is not None]
