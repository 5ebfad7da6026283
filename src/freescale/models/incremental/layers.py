"""New tokens of several histories through all layers, against the keys and values of the tokens
before them.

The tokens of all states go through the matrix products together; the attention is computed state by
state, over the state's own memory, which is never copied or padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from freescale.batch import Jagged, SequenceBatch
from freescale.kernels.attention.plan import TILE_BUDGET, TILE_ROWS, find_buckets
from freescale.kernels.attention.softmax import GPU_TILE_BUDGET, GPU_TILE_ROWS
from freescale.models.features import ItemVectors
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.models.hstu_layer import EPS, HSTULayer
from freescale.models.incremental.state import HistoryState
from freescale.models.sasrec import SASRec, SASRecLayer, normalize

ROUND_BUDGET = 1 << 24  # biases (layers * queries * keys) in memory at a time


@dataclass(frozen=True)
class NewTokens:
    """Tokens of one state."""

    state: HistoryState
    slot: int  # place of its first token among the keys
    count: int

    @property
    def seen(self) -> int:
        """Keys that the last token sees."""
        return self.slot + self.count


def run_layers(encoder: HSTU | SASRec, x: Tensor, parts: Sequence[NewTokens]) -> Tensor:
    """x [tokens, width], the tokens of one part after another -> outputs of the last layer."""
    start, outputs = 0, []
    for chosen in _plan_rounds(encoder, parts):
        tiles = [_Tile(encoder, part) for part in chosen]
        tokens = sum(part.count for part in chosen)
        rows = x[start : start + tokens]
        for number, layer in enumerate(encoder.layers):
            if isinstance(layer, HSTULayer):
                rows = _run_hstu(layer, number, rows, tiles)
            else:
                assert isinstance(layer, SASRecLayer)
                rows = _run_sasrec(layer, number, rows, tiles)
        outputs.append(rows)
        start += tokens
    return join(outputs)


def _plan_rounds(encoder: HSTU | SASRec, parts: Sequence[NewTokens]) -> Iterator[list[NewTokens]]:
    """Cuts parts into tiles, in order. The tiles of a round go through the layers together."""
    gpu = encoder.position.is_cuda
    budget, rows = (GPU_TILE_BUDGET, GPU_TILE_ROWS) if gpu else (TILE_BUDGET, TILE_ROWS)
    chosen: list[NewTokens] = []
    room = ROUND_BUDGET
    for part in parts:
        size = max(1, min(rows, budget // (encoder.heads * part.seen)))
        for slot in range(part.slot, part.seen, size):
            tile = NewTokens(part.state, slot, min(size, part.seen - slot))
            cost = len(encoder.layers) * tile.count * tile.seen
            if chosen and cost > room:
                yield chosen
                chosen, room = [], ROUND_BUDGET
            chosen.append(tile)
            room -= cost
    if chosen:
        yield chosen


class _Tile:
    """Tokens that attend together. Views and biases are made for all layers at once: with one token
    most of the time is the launch of operations."""

    def __init__(self, encoder: HSTU | SASRec, part: NewTokens) -> None:
        self.slot, self.count, seen = part.slot, part.count, part.seen
        keys, values = part.state.keys[:, :, :seen], part.state.values[:, :, :seen]
        self.keys, self.values = keys.unbind(), values.unbind()  # a layer has [heads, seen, d]
        self.new_keys = keys[:, :, part.slot :].unbind()  # [heads, count, d]
        self.new_values = values[:, :, part.slot :].unbind()
        events = part.state.find_events(seen, keys.device)
        biases = _compute_biases(encoder, part, events)
        self.biases = None if biases is None else biases.unbind()  # [count, seen]
        visible = encoder.visible
        self.mask: Tensor | None = None  # [count, seen] bool; a softmax needs one
        if part.count > 1 and isinstance(encoder, SASRec) or visible is not None:
            self.mask = torch.ones(part.count, seen, dtype=torch.bool, device=keys.device)
            self.mask.tril_(part.slot)
            if visible is not None:
                apart = events[part.slot :, None] - events
                self.mask &= (events < 0) | ~visible.hides(apart, events)


def _compute_biases(encoder: HSTU | SASRec, part: NewTokens, events: Tensor) -> Tensor | None:
    """[layers, queries, keys], for keys of these events. The prefix has none."""
    first = part.slot - part.state.prefix
    if not isinstance(encoder, HSTU) or first < 0:
        return None
    total: Tensor | None = None
    events = events[part.state.prefix :]
    if encoder.has_position_bias:
        distance = (events[first:, None] - events).clamp_(min=0)
        total = _read_biases(encoder, "position_bias", distance)
    if encoder.has_time_bias:
        times = part.state.columns["timestamps"][events]
        bucket = find_buckets(times[first:, None] - times, encoder.num_time_buckets)
        by_time = _read_biases(encoder, "time_bias", bucket)
        total = by_time if total is None else total.add_(by_time)
    if total is None or not part.state.prefix:
        return total
    return F.pad(total, (part.state.prefix, 0))


def _read_biases(encoder: HSTU, name: str, index: Tensor) -> Tensor:
    tables = torch.stack([getattr(layer, name) for layer in encoder.layers])
    return tables.index_select(1, index.flatten()).view(-1, *index.shape)


def _run_hstu(layer: HSTULayer, number: int, x: Tensor, tiles: Sequence[_Tile]) -> Tensor:
    """`HSTULayer.forward` of new tokens: x [tokens, width]."""
    norm, after, projection = layer.input_norm, layer.attention_norm, layer.projection
    normed = torch.layer_norm(x, x.shape[1:], norm.weight, norm.bias, EPS)
    sizes = [layer.heads * layer.d_v] * 2 + [layer.heads * layer.d_qk] * 2
    projected = F.silu(F.linear(normed, projection.weight, projection.bias), inplace=True)
    u, v, q, k = projected.split_with_sizes(sizes, dim=1)
    mixed = []
    for tile, inputs in _divide(tiles, layer.heads, q, k, v):
        mixed.append(_attend(layer, number, tile, *inputs))
    gated = torch.layer_norm(join(mixed), u.shape[1:], after.weight, after.bias, EPS).mul_(u)
    return F.linear(gated, layer.output.weight, layer.output.bias).add_(x)


def _attend(layer: HSTULayer, number: int, tile: _Tile, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [heads, queries, d] -> [queries, heads * d_v]."""
    torch.mul(k, layer.d_qk**-0.5, out=tile.new_keys[number])
    torch.mul(v, 1 / layer.max_length, out=tile.new_values[number])
    scores = torch.bmm(q, tile.keys[number].transpose(1, 2))
    if tile.biases is not None:
        scores.add_(tile.biases[number])
    weights = F.silu(scores, inplace=True)
    if tile.mask is not None:
        weights *= tile.mask
    elif tile.count > 1:
        weights.tril_(tile.slot)
    return _join_heads(torch.bmm(weights, tile.values[number]))


def _run_sasrec(layer: SASRecLayer, number: int, x: Tensor, tiles: Sequence[_Tile]) -> Tensor:
    """`SASRecLayer.forward` of new tokens: x [tokens, width]."""
    queries = normalize(x)
    k, v = layer.key_value(x).chunk(2, dim=1)
    mixed = []
    for tile, (q_t, k_t, v_t) in _divide(tiles, layer.heads, layer.query(queries), k, v):
        tile.new_keys[number].copy_(k_t)
        tile.new_values[number].copy_(v_t)
        inputs = q_t[None], tile.keys[number][None], tile.values[number][None]
        mixed.append(_join_heads(F.scaled_dot_product_attention(*inputs, tile.mask)[0]))
    middle = normalize(queries + layer.output(join(mixed)))
    result: Tensor = layer.result(F.relu(layer.hidden(middle)))
    return middle + result


def _divide(
    tiles: Sequence[_Tile], heads: int, *parts: Tensor
) -> Iterator[tuple[_Tile, list[Tensor]]]:
    """Yields each tile with its rows of the parts [tokens, heads * d], as [heads, tokens, d]."""
    whole = [part.view(len(part), heads, -1).transpose(0, 1) for part in parts]
    start = 0
    for tile in tiles:
        stop = start + tile.count
        yield tile, whole if len(tiles) == 1 else [part[:, start:stop] for part in whole]
        start = stop


def _join_heads(rows: Tensor) -> Tensor:
    """[heads, tokens, d] -> [tokens, heads * d]."""
    return rows.transpose(0, 1).flatten(1)


def join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def list_columns(model: Retrieval) -> list[str]:
    """The columns of events that the model reads."""
    found = {
        "history": True,
        "timestamps": model.encoder.has_time_bias,
        "actions": model.action is not None,
        "event_features": model.event_features is not None,
        "history_features": model.item_features is not None,
        "history_own": model.item_features is not None,
        "history_vectors": len(model.item_vectors) > 0,
    }
    return [name for name, read in found.items() if read]


def embed_events(model: Retrieval, columns: dict[str, Tensor], counts: list[int]) -> Tensor:
    """[events, width]"""
    lengths = torch.tensor(counts)  # on the host: nobody reads them on the device
    batch = SequenceBatch({name: Jagged(values, lengths) for name, values in columns.items()})
    items, history = None, batch.sequences["history"]
    if model.item_features is not None:  # these events alone, not the whole table
        described = (columns.get(f"history_{name}") for name in ("features", "own", "vectors"))
        rows = model.describe_rows(model.item(history.values), *described)
        items = ItemVectors(rows, {"history": torch.arange(len(rows), device=rows.device)})
    return model._embed_events(batch, history, items)
