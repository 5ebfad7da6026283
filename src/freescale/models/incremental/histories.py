"""Histories that grow one event at a time, for serving: what an encoder has computed of them stays.

An event sees only what came before it, so keys and values of earlier events never change, and a new
event needs only its own queries. But positions count from the first event, and the keys of deeper
layers contain everything before them: a window over the history cannot slide. When a history is
full, its oldest quarter is dropped and the rest is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.models.columns import find_sequence
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.models.incremental import one_event
from freescale.models.incremental.layers import (
    NewTokens,
    embed_events,
    join,
    list_columns,
    run_layers,
)
from freescale.models.incremental.state import HistoryState
from freescale.models.prefix import prepare_prefix
from freescale.models.sasrec import SASRec


@torch.no_grad()
def start_histories(model: Retrieval, batch: SequenceBatch) -> list[HistoryState]:
    """Computes each history of a batch, and keeps what later events need.

    Args:
        model: In eval mode, with HSTU or SASRec as its encoder.
        batch: Histories, also empty ones, as `encode_queries` reads them. Of more than `max_length`
            events, the latest three quarters of `max_length` remain.
    """
    encoder = _check_model(model)
    batch = _move(batch, encoder.position.device)
    columns = {  # copies: a view would keep the whole batch
        name: find_sequence(batch, name).values[:0].clone() for name in list_columns(model)
    }
    users, codes = model._embed_users(batch), None
    if users is not None:
        codes = batch.values("user_features")
    states = [
        HistoryState(
            encoder,
            columns,
            None if codes is None else codes[sample : sample + 1].clone(),
            0 if users is None else users.shape[1],
        )
        for sample in range(len(find_sequence(batch, "history")))
    ]
    if users is not None:
        x, _ = prepare_prefix(users, None, encoder.position.dtype, encoder.input_scale, 1.0)
        run_layers(encoder, x, [NewTokens(state, 0, state.prefix) for state in states])
    _append(model, encoder, states, batch)
    return states


@torch.no_grad()
def append_events(
    model: Retrieval, states: Sequence[HistoryState], events: SequenceBatch
) -> Tensor:
    """Appends events to histories.

    Args:
        model: The model that the states are of, with the same weights.
        states: Of different users.
        events: One sample per state: its new events, any number of them, with the columns that
            `encode_queries` reads. Features of users are those of the start. With features of
            requests, `context_features` of each sample, or of each event: then the last one counts.

    Returns:
        [samples, width]: queries after the last events, as of `Retrieval.encode_queries`.
    """
    encoder = _check_model(model)
    if len({id(state) for state in states}) < len(states):
        raise ValueError("a state occurs twice: put all events of a user into one sample")
    if len(states) != len(events):
        raise ValueError(f"there are {len(states)} states, but events of {len(events)} users")
    context = _embed_context(model, events)
    queries = _append(model, encoder, states, events)
    if queries is not None and context is None:
        return queries
    return _make_queries(model, states, context)


@torch.no_grad()
def encode_states(
    model: Retrieval, states: Sequence[HistoryState], requests: SequenceBatch | None = None
) -> Tensor:
    """Encodes histories as queries, without new events: [states, width]. `requests` has the dense
    `context_features` of each, if the model has any."""
    _check_model(model)
    context = None
    if model.context_features is not None:
        if requests is None:
            raise ValueError("the model has features of requests: give their 'context_features'")
        context = _embed_context(model, requests)
    return _make_queries(model, states, context)


def _check_model(model: Retrieval) -> HSTU | SASRec:
    if not isinstance(model, Retrieval):
        raise ValueError(f"histories grow for a Retrieval model, not for {type(model).__name__}")
    encoder = model.encoder
    wide = isinstance(encoder, HSTU) and encoder.wide
    if wide or not (type(encoder) is HSTU or type(encoder) is SASRec):
        raise ValueError(
            "histories grow for the encoders HSTU and SASRec, not for "
            f"{'wide ' * wide}{type(encoder).__name__}"
        )
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    return encoder


def _move(batch: SequenceBatch, device: torch.device) -> SequenceBatch:
    return batch if batch.device == device else batch.to(device, non_blocking=True)


def _embed_context(model: Retrieval, batch: SequenceBatch) -> Tensor | None:
    """[samples, width]: of the request that follows the last event."""
    if model.context_features is None:
        return None
    name = "context_features"
    sequences = {name: batch.sequences[name]} if name in batch.sequences else {}
    dense = {name: batch.dense[name]} if name in batch.dense else {}
    if sequences or dense:  # other columns may stay on the host
        batch = SequenceBatch(sequences, dense=dense)
    batch = _move(batch, model.encoder.position.device)
    context = model._embed_context(batch)
    if name not in batch.sequences:
        return context
    part = batch.sequences[name]
    if (part.host_lengths == 0).any():
        raise ValueError("a sample without events needs dense 'context_features'")
    assert context is not None
    return context[part.offsets[1:] - 1]


def _make_queries(
    model: Retrieval, states: Sequence[HistoryState], context: Tensor | None
) -> Tensor:
    if not states:
        return model.encoder.position.new_zeros(0, model.encoder.width)
    outputs = torch.stack([state.output for state in states])
    empty = [not state.length for state in states]
    mask = torch.tensor(empty, device=outputs.device) if any(empty) else None
    return model.make_queries(outputs, context, mask)


def _append(
    model: Retrieval,
    encoder: HSTU | SASRec,
    states: Sequence[HistoryState],
    events: SequenceBatch,
) -> Tensor | None:
    """Returns the queries of a model without features of requests, if they are known."""
    columns, counts = _read_columns(model, events)
    single, others = list[int](), list[int]()
    for place, (state, count) in enumerate(zip(states, counts, strict=True)):
        (single if count == 1 and state.length < state.limit else others).append(place)
    if not single or not one_event.fits(model, states, columns):
        _append_any(model, encoder, states, events)
    elif not others:
        return one_event.append_one(model, states, columns)
    else:
        rest = events.select(torch.tensor(others))
        _append_any(model, encoder, [states[place] for place in others], rest)
        columns, _ = _read_columns(model, events.select(torch.tensor(single)))
        one_event.append_one(model, [states[place] for place in single], columns)
    return None


def _append_any(
    model: Retrieval,
    encoder: HSTU | SASRec,
    states: Sequence[HistoryState],
    events: SequenceBatch,
) -> None:
    """Any number of events."""
    columns, counts = _read_columns(model, _move(events, encoder.position.device))
    start = 0
    pieces: list[dict[str, Tensor]] = []
    full = [state.length + count > state.limit for state, count in zip(states, counts, strict=True)]
    for place, state in enumerate(states):
        stop = start + counts[place]
        piece = {name: values[start:stop] for name, values in columns.items()}
        if full[place]:
            piece = state.select_latest(piece, stop - start)
            counts[place] = len(piece["history"])
        pieces.append(piece)
        start = stop
    if any(full):
        columns = {name: torch.cat([piece[name] for piece in pieces]) for name in columns}
    if not sum(counts):
        return
    x = embed_events(model, columns, counts)  # fails, if at all, before a state has changed
    parts, positions = [], []
    for state, piece, count, anew in zip(states, pieces, counts, full, strict=True):
        if anew:
            state.clear()
        state.write(piece, count)
        positions.append(encoder.position[state.length : state.length + count])
        if count:
            parts.append(NewTokens(state, state.used, count))
    x = x.to(encoder.position.dtype) * encoder.input_scale + join(positions)
    outputs, stop = run_layers(encoder, x, parts), 0
    for state, count in zip(states, counts, strict=True):
        stop += count
        if count:
            state.length, state.output = state.length + count, outputs[stop - 1].clone()
            state.trim()


def _read_columns(model: Retrieval, events: SequenceBatch) -> tuple[dict[str, Tensor], list[int]]:
    """The columns that the model reads, and the number of events of each sample."""
    history = find_sequence(events, "history")
    columns = {n: find_sequence(events, n, history).values for n in list_columns(model)}
    return columns, history.host_lengths.tolist()
