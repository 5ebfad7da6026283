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

from freescale.kernels.attention.plan import TILE_BUDGET, TILE_ROWS, find_buckets
from freescale.kernels.attention.softmax import GPU_TILE_BUDGET, GPU_TILE_ROWS
from freescale.models.hstu import HSTU
from freescale.models.hstu_layer import EPS, HSTULayer
from freescale.models.incremental.state import HistoryState
from freescale.models.sasrec import SASRec, SASRecLayer, normalize

ROUND_BUDGET = 1 << 24  # biases (layers * queries * keys) in memory at a time


@dataclass
class NewTokens:
    """Tokens of one state."""

    state: HistoryState
    slot: int  # of its first token, among the keys
    count: int
    bias: Tensor | None = None  # [layers, queries, keys]

    @property
    def seen(self) -> int:
        """Keys that the last token sees."""
        return self.slot + self.count


def run_layers(encoder: HSTU | SASRec, x: Tensor, parts: Sequence[NewTokens]) -> Tensor:
    """x [tokens, width], the tokens of one part after another -> outputs of the last layer."""
    start, outputs = 0, []
    for tiles in _plan_rounds(encoder, parts):
        for tile in tiles:
            tile.bias = _compute_bias(encoder, tile)
        tokens = sum(tile.count for tile in tiles)
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
    tiles: list[NewTokens] = []
    room = ROUND_BUDGET
    for part in parts:
        size = max(1, min(rows, budget // (encoder.heads * part.seen)))
        for slot in range(part.slot, part.seen, size):
            tile = NewTokens(part.state, slot, min(size, part.seen - slot))
            cost = len(encoder.layers) * tile.count * tile.seen
            if tiles and cost > room:
                yield tiles
                tiles, room = [], ROUND_BUDGET
            tiles.append(tile)
            room -= cost
    if tiles:
        yield tiles


def _compute_bias(encoder: HSTU | SASRec, tile: NewTokens) -> Tensor | None:
    """Of all layers at once, for fewer launches: [layers, queries, keys]. The prefix has none."""
    first, seen = (number - tile.state.prefix for number in (tile.slot, tile.seen))
    if not isinstance(encoder, HSTU) or first < 0:
        return None
    total: Tensor | None = None
    device = encoder.position.device
    if encoder.has_position_bias:
        queries = torch.arange(first, seen, device=device)
        distance = (queries[:, None] - torch.arange(seen, device=device)).clamp_(min=0)
        total = _read_biases(encoder, "position_bias", distance)
    if encoder.has_time_bias:
        times = tile.state.columns["timestamps"][:seen]
        bucket = find_buckets(times[first:, None] - times, encoder.num_time_buckets)
        by_time = _read_biases(encoder, "time_bias", bucket)
        total = by_time if total is None else total.add_(by_time)
    if total is None or not tile.state.prefix:
        return total
    return F.pad(total, (tile.state.prefix, 0))


def _read_biases(encoder: HSTU, name: str, index: Tensor) -> Tensor:
    tables = torch.stack([getattr(layer, name) for layer in encoder.layers])
    return tables.index_select(1, index.flatten()).view(-1, *index.shape)


def _run_hstu(layer: HSTULayer, number: int, x: Tensor, tiles: Sequence[NewTokens]) -> Tensor:
    """`HSTULayer.forward` of new tokens: x [tokens, width]."""
    norm, after, projection = layer.input_norm, layer.attention_norm, layer.projection
    normed = F.layer_norm(x, x.shape[1:], norm.weight, norm.bias, EPS)
    sizes = [layer.heads * layer.d_v] * 2 + [layer.heads * layer.d_qk] * 2
    projected = F.silu(F.linear(normed, projection.weight, projection.bias), inplace=True)
    u, v, q, k = torch.split(projected, sizes, dim=1)
    mixed, start = [], 0
    for tile in tiles:
        stop = start + tile.count
        heads = (_split_heads(part[start:stop], layer.heads) for part in (q, k, v))
        mixed.append(_attend(layer, number, tile, *heads))
        start = stop
    gated = F.layer_norm(join(mixed), u.shape[1:], after.weight, after.bias, EPS).mul_(u)
    return F.linear(gated, layer.output.weight, layer.output.bias).add_(x)


def _attend(
    layer: HSTULayer, number: int, tile: NewTokens, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """q, k, v [heads, queries, d] -> [queries, heads * d_v]."""
    keys, values = tile.state.keys[number], tile.state.values[number]
    torch.mul(k, layer.d_qk**-0.5, out=keys[:, tile.slot : tile.seen])
    torch.mul(v, 1 / layer.max_length, out=values[:, tile.slot : tile.seen])
    scores = torch.bmm(q, keys[:, : tile.seen].transpose(1, 2))
    if tile.bias is not None:
        scores.add_(tile.bias[number])
    weights = F.silu(scores, inplace=True)
    if tile.count > 1:
        weights.tril_(tile.slot)
    return _join_heads(torch.bmm(weights, values[:, : tile.seen]))


def _run_sasrec(layer: SASRecLayer, number: int, x: Tensor, tiles: Sequence[NewTokens]) -> Tensor:
    """`SASRecLayer.forward` of new tokens: x [tokens, width]."""
    queries = normalize(x)
    k, v = layer.key_value(x).chunk(2, dim=1)
    q, mixed, start = layer.query(queries), [], 0
    for tile in tiles:
        keys, values = tile.state.keys[number], tile.state.values[number]
        new = slice(start, start + tile.count)
        keys[:, tile.slot : tile.seen] = _split_heads(k[new], layer.heads)
        values[:, tile.slot : tile.seen] = _split_heads(v[new], layer.heads)
        mask = None
        if tile.count > 1:
            mask = torch.ones(tile.count, tile.seen, dtype=torch.bool, device=x.device)
            mask = mask.tril_(tile.slot)
        found = F.scaled_dot_product_attention(
            _split_heads(q[new], layer.heads)[None],
            keys[None, :, : tile.seen],
            values[None, :, : tile.seen],
            attn_mask=mask,
        )
        mixed.append(_join_heads(found[0]))
        start += tile.count
    middle = normalize(queries + layer.output(join(mixed)))
    result: Tensor = layer.result(F.relu(layer.hidden(middle)))
    return middle + result


def _split_heads(rows: Tensor, heads: int) -> Tensor:
    """[tokens, heads * d] -> [heads, tokens, d], a view."""
    return rows.view(len(rows), heads, -1).transpose(0, 1)


def _join_heads(rows: Tensor) -> Tensor:
    """[heads, tokens, d] -> [tokens, heads * d]."""
    return rows.transpose(0, 1).flatten(1)


def join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
