"""A small DLRM, batches for it, and its logits by the formulas, token by token."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import layer_norm, silu

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.models import DlrmHSTU, DlrmRanking, FeatureTables

ITEMS, ROWS, CONTEXT_ROWS, ACTIONS, TASKS = 30, 20, 25, 8, ("like", "skip")
WIDTH, HEADS, PLACES, CONTEXT = 8, 2, 2, 3
MAX_LENGTH, POSITIONS, BUCKETS = 12, 11, 40
NOW = 1_700_000_000


def make_model(dropout=0.0, tables=None, **options):
    torch.manual_seed(0)
    encoder = DlrmHSTU(
        width=WIDTH, layers=2, heads=HEADS, d_qk=3, d_v=5, max_length=MAX_LENGTH, context=CONTEXT,
        positions=POSITIONS, time_buckets=BUCKETS, dropout=dropout, input_dropout=dropout,
    )  # fmt: skip
    tables = tables or FeatureTables(
        ROWS, context=CONTEXT_ROWS, item_places=PLACES, context_places=CONTEXT
    )
    given = {"num_items": ITEMS, "num_actions": ACTIONS, "tasks": TASKS}
    model = DlrmRanking(
        encoder, feature_tables=tables, input_hidden=6, head_hidden=10, **given | options
    )
    with torch.no_grad():  # no term may vanish, no norm may be the identity
        for name, parameter in model.named_parameters():
            if "table" not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double()


def make_batch(lengths=(9, 0, 4), counts=(1, 1, 1), seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(bound, *shape):
        return torch.randint(0, bound, shape, generator=generator)

    lengths, counts = torch.tensor(lengths), torch.tensor(counts)
    events, candidates = int(lengths.sum()), int(counts.sum())
    times = [
        NOW - 3600 * n - torch.cumsum(draw(90_000, length), 0).flip(0)
        for n, length in enumerate(lengths.tolist())
    ]
    context = draw(CONTEXT_ROWS, len(counts), CONTEXT).repeat_interleave(counts, 0)
    moments = torch.repeat_interleave(NOW - 3600 * torch.arange(len(counts)), counts)
    sequences = {
        "history": draw(ITEMS, events),
        "history_features": draw(ROWS, events, PLACES),
        "history_own": draw(4, events) / 3,
        "actions": draw(ACTIONS, events),
        "timestamps": torch.cat(times),
    }
    of_candidates = {
        "candidates_features": draw(ROWS, candidates, PLACES),
        "candidates_own": draw(4, candidates) / 3,
        "candidate_timestamps": moments + 400 * draw(3, candidates),
        "context_features": context,
        "labels": draw(2, candidates, len(TASKS)).float(),
    }
    jagged = {name: Jagged(values, lengths) for name, values in sequences.items()}
    jagged |= {name: Jagged(values, counts) for name, values in of_candidates.items()}
    ones = torch.ones(candidates, dtype=torch.int64)
    return SequenceBatch(
        jagged,
        {"candidates": Nested(draw(ITEMS, candidates), ones, counts)},
        weights={task: counts.double() for task in TASKS},
        keys=draw(2**60, len(lengths)),
    )


def compute_logits(model, batch):
    """[candidates, tasks]: the logits by their definition."""
    weights = dict(model.named_parameters())
    starts = [0, *batch.sequences["history"].lengths.cumsum(0).tolist()]
    of_candidates = [0, *batch.candidates["candidates"].counts.cumsum(0).tolist()]
    found = []
    for sample in range(len(batch)):
        mine = slice(starts[sample], starts[sample + 1])
        offered = slice(of_candidates[sample], of_candidates[sample + 1])
        found += _judge_sample(model, weights, batch, mine, offered)
    return torch.stack(found)


def _judge_sample(model, weights, batch, mine, offered):
    def value(name, part):
        return list(batch.values(name)[part])

    tokens, times = [], []
    row = value("context_features", offered)[0]
    for place in range(CONTEXT):
        vector = weights["context_features.weight"][row[place]]
        tokens.append(vector @ weights["context_weight"][place] + weights["context_bias"][place])
        times.append(0)
    items = {}
    for name, part in (("history", mine), ("candidates", offered)):
        for number, item in enumerate(value(name, part)):
            own = value(f"{name}_own", part)[number].double()
            vector = own * weights["item.weight"][item]
            codes = value(f"{name}_features", part)[number]
            side = torch.cat([weights["item_features.weight"][code] for code in codes])
            token = _network(weights, "content", vector) + _network(weights, "additional", side)
            bits = weights["action_bits"]
            if name == "history":
                action = int(value("actions", part)[number])
                marks = [action // 2**bit % 2 for bit in range(len(bits))]
                inputs = torch.cat([mark * row for mark, row in zip(marks, bits, strict=True)])
                times.append(int(value("timestamps", part)[number]))
            else:
                inputs = weights["no_action"][0]
                times.append(int(value("candidate_timestamps", part)[number]))
                items[len(tokens)] = torch.cat([vector, side])
            tokens.append(token + _network(weights, "action_network", inputs))
    before = min(items)  # tokens before the candidates
    x = []
    for place, (token, time) in enumerate(zip(tokens, times, strict=True)):
        back = CONTEXT + before - min(place, before)
        position = place if place < CONTEXT else min(back, POSITIONS - 1)
        bucket = min(BUCKETS, int(math.sqrt(max(0, times[-1] - time) / 60)))
        encoded = weights["encoder.position"][position] + weights["encoder.time"][bucket]
        x.append(token * math.sqrt(WIDTH) + encoded)
    for number in range(len(model.encoder.layers)):
        own = {
            name.split(".", 3)[3]: parameter
            for name, parameter in weights.items()
            if name.startswith(f"encoder.layers.{number}.")
        }
        x = _run_layer(own, model.encoder.widths, torch.stack(x), before)
    logits = []
    for place, item in items.items():
        angles = [
            2 * 3.14 * (times[place] // unit % count) / count
            for unit, count in ((3600, 24), (86400, 7))
        ]
        phases = [f(angle) for angle in angles for f in (math.cos, math.sin)]
        user = torch.cat([x[place], x[place].new_tensor(phases)])
        user = _norm(weights, "time_network.1", _linear(weights, "time_network.0", user), 1e-5)
        both = user * _network(weights, "candidate_network", item)
        logits.append(_network(weights, "judge", both, norm=False))
    return logits


def _run_layer(own, widths, x, before):
    d_qk, d_v = widths
    projected = [_linear(own, "projection", _norm(own, "input_norm", row, 1e-6)) for row in x]
    sizes = [HEADS * d_v] * 2 + [HEADS * d_qk] * 2
    u, v, q, k = zip(*(torch.split(row, sizes) for row in projected), strict=True)
    outputs = []
    for i, row in enumerate(x):
        attended = []
        for head in range(HEADS):
            of_head = slice(head * d_qk, (head + 1) * d_qk)
            total = 0 * v[i][:d_v]
            for j in range(i + 1):
                if before <= j < i:  # another candidate
                    continue
                score = (q[i][of_head] * k[j][of_head]).sum() / math.sqrt(d_qk)
                total = total + silu(score) / MAX_LENGTH * v[j][head * d_v : (head + 1) * d_v]
            attended.append(total)
        attended, gate = torch.cat(attended), silu(u[i])
        gated = gate * _norm(own, "attention_norm", attended, 1e-6)
        outputs.append(row + own["output.weight"] @ torch.cat([gate, attended, gated]))
    return outputs


def _linear(weights, name, x):
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def _norm(weights, name, x, eps):
    return layer_norm(x, x.shape, weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def _network(weights, name, x, norm=True):
    hidden = _linear(weights, f"{name}.0", x)
    hidden = hidden * _norm(weights, f"{name}.1", hidden, 1e-5).sigmoid()
    out = _linear(weights, f"{name}.2", hidden)
    return _norm(weights, f"{name}.3", out, 1e-5) if norm else out
