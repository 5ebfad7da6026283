"""Histories that grow by appended events, against computing anew the events that they report."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import torch
from helpers.feature_cases import ITEMS
from helpers.incremental_cases import ACTIONS, KINDS, LONGEST, WIDTH, draw_events, make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.models import (
    HSTU,
    Ranking,
    Retrieval,
    append_events,
    encode_states,
    start_histories,
)
from freescale.models.incremental import layers as incremental_layers
from freescale.models.incremental import one_event
from freescale.models.incremental import state as incremental_state


def add_context(batch, code):
    """The same context for the sample as for its last event."""
    return replace(batch, dense={**batch.dense, "context_features": code.view(1, 1)})


def assert_anew(model, states, queries, contexts=None):
    for sample, state in enumerate(states):
        batch = state.events
        assert len(batch.sequences["history"].values) == state.length
        if contexts is not None:
            batch = add_context(batch, contexts[sample])
        with torch.no_grad():
            expected = model.encode_queries(batch)[0]
        torch.testing.assert_close(queries[sample], expected, rtol=1e-5, atol=1e-5)


def list_values(batch, sample, name):
    part = batch.sequences[name]
    return part.slice(sample, sample + 1).values


SHARED = {kind: make_model(kind) for kind in KINDS}
FEATURED = {
    kind: make_model(kind, features=True)
    for kind in ("both biases", "sasrec", "semi-local", "sasrec, semi-local")
}


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=2, max_size=6),
    st.integers(0, 10**6),
)
def test_appended_events_equal_computing_anew(steps, seed):
    """Two users at once; the first step is the start. Chunks of several events and rebuilds."""
    model = SHARED["both biases"]
    states = start_histories(model, draw_events(steps[0], seed))
    for number, counts in enumerate(steps[1:]):
        queries = append_events(model, states, draw_events(counts, seed + number + 1))
    assert_anew(model, states, queries)
    assert all(state.length <= LONGEST for state in states)


@pytest.mark.parametrize("kind", KINDS)
def test_every_encoder_and_bias(kind):
    model = SHARED[kind]
    states = start_histories(model, draw_events([3, 0, LONGEST, 7], 1))
    assert_anew(model, states, encode_states(model, states))
    for step in range(30):
        counts = [1, step % 3, 1, 5 * (step % 2)]
        queries = append_events(model, states, draw_events(counts, 2 + step))
        assert_anew(model, states, queries)
        assert torch.equal(queries, encode_states(model, states))
    assert all(state.rebuilds for state in states)


@pytest.mark.parametrize("kind", FEATURED)
def test_features_of_users_items_events_and_requests(kind):
    model = FEATURED[kind]
    start = draw_events([3, 0, 9], 1)
    states = start_histories(model, start)
    for step in range(20):
        events = draw_events([1, 2, 3], 2 + step)
        queries = append_events(model, states, events)
        codes = [list_values(events, sample, "context_features")[-1] for sample in range(3)]
        assert_anew(model, states, queries, codes)
    for sample, state in enumerate(states):
        kept = state.events.dense["user_features"]
        assert torch.equal(kept[0], start.dense["user_features"][sample])
    requests = draw_events([0, 0, 1], 50, context="sample")
    contexts = requests.dense["context_features"]
    assert_anew(model, states, encode_states(model, states, requests), contexts)
    assert_anew(model, states, append_events(model, states, requests), contexts)


def test_a_full_history_drops_its_oldest_quarter():
    model = SHARED["both biases"]
    first, events = draw_events([LONGEST], 1), draw_events([1], 2)
    (state,) = start_histories(model, first)
    assert state.length == LONGEST and not state.rebuilds
    append_events(model, [state], events)
    assert state.length == LONGEST - LONGEST // 4 and state.rebuilds == 1
    for name in ("history", "actions", "timestamps"):
        joined = torch.cat([list_values(part, 0, name) for part in (first, events)])
        assert torch.equal(list_values(state.events, 0, name), joined[-state.length :])


@pytest.mark.parametrize("count", [LONGEST + 1, 40])
def test_more_events_than_fit_leave_the_latest(count):
    model = SHARED["both biases"]
    events = draw_events([count], 1)
    (started,) = start_histories(model, events)
    (appended,) = start_histories(model, draw_events([2], 2))
    queries = append_events(model, [appended], events)
    for state in (started, appended):
        assert_anew(model, [state], queries)
        latest = list_values(events, 0, "history")[-(LONGEST - LONGEST // 4) :]
        assert torch.equal(list_values(state.events, 0, "history"), latest)


@pytest.mark.parametrize("kind", ["both biases", "sasrec"])
def test_tiles_of_a_long_chunk(kind, monkeypatch):
    """As on a long history: a chunk is cut into tiles, and these into rounds."""
    monkeypatch.setattr(incremental_layers, "TILE_BUDGET", 100)
    monkeypatch.setattr(incremental_layers, "ROUND_BUDGET", 200)
    model = make_model(kind, features=True, longest=40)
    states = start_histories(model, draw_events([39, 20], 1))
    events = draw_events([17, 20], 2, context="sample")
    queries = append_events(model, states, events)
    assert [state.length for state in states] == [30, 40]
    assert_anew(model, states, queries, events.dense["context_features"])


def test_memory_doubles_up_to_the_longest_history(monkeypatch):
    monkeypatch.setattr(incremental_state, "FIRST_CAPACITY", 4)
    model = make_model(longest=40)
    (state,) = start_histories(model, draw_events([3], 1))
    sizes, slots = [state.nbytes], [state.keys.shape[2]]
    for step in range(55):
        before = state.keys.data_ptr()
        append_events(model, [state], draw_events([1], 2 + step))
        if state.keys.shape[2] == slots[-1]:
            assert state.keys.data_ptr() == before  # appended in place
        else:
            slots.append(state.keys.shape[2])
            sizes.append(state.nbytes)
    assert slots == [4, 8, 16, 32, 40] and state.rebuilds == 2
    layers, columns = 2, 3 * 8  # item, action, time: int64
    of_event = 2 * layers * WIDTH * 4 + columns
    assert sizes == [count * of_event + WIDTH * 4 for count in slots]


@pytest.mark.parametrize("kind", ["semi-local", "sasrec, semi-local"])
def test_keys_that_no_event_sees_are_dropped(kind):
    model = make_model(kind, features=True, longest=200)
    states = start_histories(model, draw_events([150, 2], 1))
    for step in range(40):
        events = draw_events([1, 1 + 4 * (step % 2)], 2 + step, context="sample")
        queries = append_events(model, states, events)
        for state in states:
            assert state.length - state.skipped <= state.keys.shape[2] - state.prefix <= 2 * 5
    assert_anew(model, states, queries, events.dense["context_features"])
    assert states[0].length == 190 and states[0].skipped >= 180 and states[1].length == 122


def test_a_failed_append_changes_nothing():
    model = SHARED["both biases"]
    states = start_histories(model, draw_events([LONGEST, 4], 1))
    before = [state.events.values("history").clone() for state in states]
    events = draw_events([1, 1], 2)
    events.sequences["history"].values[1] = ITEMS
    with pytest.raises(IndexError):
        append_events(model, states, events)
    after = [state.events.values("history") for state in states]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert_anew(model, states, append_events(model, states, draw_events([1, 1], 3)))


def test_what_is_refused():
    model, events = SHARED["both biases"], draw_events([2, 2], 1)
    states = start_histories(model, events)
    with pytest.raises(ValueError, match="a state occurs twice"):
        append_events(model, [states[0], states[0]], events)
    with pytest.raises(ValueError, match="1 states, but events of 2 users"):
        append_events(model, states[:1], events)
    without_actions = {n: p for n, p in events.sequences.items() if n != "actions"}
    with pytest.raises(ValueError, match="no sequence 'actions'"):
        start_histories(model, replace(events, sequences=without_actions))
    with pytest.raises(ValueError, match="call model.eval"):
        start_histories(make_model().train(), events)
    sizes = {"width": WIDTH, "layers": 1, "heads": 2, "max_length": LONGEST}

    class Mine(HSTU):
        pass

    with pytest.raises(ValueError, match="not for Mine"):
        start_histories(Retrieval(Mine(**sizes), num_items=ITEMS).eval(), events)
    ranking = Ranking(HSTU(**sizes), num_items=ITEMS, tasks=["click"]).eval()
    with pytest.raises(ValueError, match="not for Ranking"):
        start_histories(ranking, events)
    featured = FEATURED["sasrec"]
    states = start_histories(featured, draw_events([2], 1))
    with pytest.raises(ValueError, match="'context_features'"):
        encode_states(featured, states)
    with pytest.raises(ValueError, match="a sample without events"):
        append_events(featured, states, draw_events([0], 2))


def test_graphs_are_dropped_when_weights_move():
    model = make_model()
    layer = model.encoder.layers[0]
    with torch.no_grad():
        watch = one_event._Watch(model)
        layer.output.weight.mul_(2)
        model.load_state_dict(model.state_dict())
        assert watch.holds()
    moves = [
        lambda: setattr(layer.output, "weight", torch.nn.Parameter(layer.output.weight * 2)),
        lambda: setattr(layer.output.bias, "data", layer.output.bias.detach().clone()),
        lambda: setattr(model, "action", torch.nn.Embedding(ACTIONS, WIDTH)),
        lambda: model.double(),
    ]
    for move in moves:
        watch = one_event._Watch(model)
        move()
        assert not watch.holds()
    assert not one_event._Watch().holds()


def test_graphs_go_with_their_model():
    model, count = make_model(), len(one_event._graphs)
    one_event._graphs[model] = one_event._Graphs()
    one_event._graphs[model].watch = one_event._Watch(model)
    copy.deepcopy(model)
    assert len(one_event._graphs) == count + 1
    del model
    gc.collect()
    assert len(one_event._graphs) == count
