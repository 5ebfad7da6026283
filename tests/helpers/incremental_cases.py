"""Models and events for histories that grow. As a program: single events through the kernels, in
Triton's interpreter, against `layers`; as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from freescale.batch import Jagged, SequenceBatch
from freescale.kernels.attention import triton_decode
from freescale.kernels.attention.plan_columns import NewEventColumn
from freescale.models import (
    HSTU,
    Retrieval,
    SASRec,
    append_events,
    start_histories,
)
from freescale.models.incremental import one_event
from freescale.models.incremental import state as incremental_state
from freescale.visible import Visible
from helpers.feature_cases import ITEMS, TABLES

WIDTH, LONGEST, ACTIONS = 8, 13, 5
BIASES = {
    "both biases": {},
    "positions": {"time_bias": False},
    "times": {"position_bias": False},
    "no bias": {"position_bias": False, "time_bias": False},
    "semi-local": {"visible": Visible(2, 3)},
}
KINDS = [*BIASES, "sasrec", "sasrec, semi-local"]


def make_model(kind="both biases", features=False, longest=LONGEST, **more):
    torch.manual_seed(0)
    sizes = {"width": WIDTH, "layers": 2, "heads": 2, "max_length": longest} | more
    if kind.startswith("sasrec"):
        encoder = SASRec(**sizes, visible=Visible(1, 4) if "semi-local" in kind else None)
    else:
        encoder = HSTU(**sizes, num_time_buckets=32, **BIASES[kind])
        for layer in encoder.layers:  # larger than at first, to be seen in the outputs
            torch.nn.init.normal_(layer.projection.weight, std=0.3)
            for bias in (layer.position_bias, layer.time_bias):
                if bias is not None:
                    torch.nn.init.normal_(bias)
    tables = {"feature_tables": TABLES} if features else {}
    model = Retrieval(encoder, num_items=ITEMS, num_actions=ACTIONS, **tables)
    return model.eval()


def draw_events(counts, seed, context="position"):
    """With every column that a model with features reads, `context_features` of each event or of
    each sample."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    lengths, tokens, users = torch.tensor(counts), sum(counts), len(counts)
    items = draw(ITEMS, tokens)
    columns = {
        "history": items,
        "history_features": items[:, None] * torch.tensor([3, 7]) % 40,
        "history_own": items % 5 / 4,
        "history_vectors": items,
        "actions": draw(ACTIONS, tokens),
        "timestamps": 40 * (seed % 1000) + draw(30, tokens).cumsum(0),  # near the edges
        "event_features": draw(9, tokens, 2),
    }
    dense = {"user_features": draw(17, users, 3)}
    homes = {"sequences": {name: Jagged(part, lengths) for name, part in columns.items()}}
    homes["dense"] = dense
    if context == "position":
        homes["sequences"]["context_features"] = Jagged(draw(5, tokens, 1), lengths)
    else:
        dense["context_features"] = draw(5, users, 1)
    return SequenceBatch(**homes)


CASES = {
    **{kind: {"kind": kind} for kind in BIASES},
    "features": {"features": True},
    "features, semi-local": {"features": True, "kind": "semi-local"},
    "heads of odd widths": {"d_qk": 3, "d_v": 6},
}


class Pair:
    """The same histories twice: one copy grows by the kernels if it can, the other by `layers`."""

    def __init__(self, model: Retrieval, lengths: list[int], device: str = "cpu") -> None:
        self.model, self.device = model, device
        self.seed = 1
        with kernels(False):
            start = draw_events(lengths, self.seed)
            self.fast, self.plain = (start_histories(model, start) for _ in range(2))

    def draw(self, counts: list[int]) -> SequenceBatch:
        self.seed += 1
        return draw_events(counts, self.seed, context="sample")

    def append(self, counts: list[int]) -> dict[str, float]:
        """Appends to the first users' histories. Returns how far the copies are apart."""
        events = self.draw(counts)
        fast, plain = self.fast[: len(counts)], self.plain[: len(counts)]
        with kernels(self.device == "cpu" or None):
            found = append_events(self.model, fast, events)
        with kernels(False):
            expected = append_events(self.model, plain, events)
        worst = {"queries": _measure(found, expected)}
        for ours, theirs in zip(fast, plain, strict=True):
            used = theirs.used
            assert ours.used == used
            assert (ours.length, ours.rebuilds) == (theirs.length, theirs.rebuilds)
            for name in ("keys", "values"):
                a, b = (getattr(state, name)[:, :, :used] for state in (ours, theirs))
                worst[name] = max(worst.get(name, 0.0), _measure(a, b))
            worst["output"] = max(worst.get("output", 0.0), _measure(ours.output, theirs.output))
            columns = zip(ours.events.tensors(), theirs.events.tensors(), strict=True)
            assert all(torch.equal(a, b) for a, b in columns)
        return worst


def _measure(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return float((a - b).norm() / b.norm().clamp(min=1e-9))


@contextmanager
def kernels(used: bool | None) -> Iterator[None]:
    """With the kernels or without. None: as the device allows."""
    before = one_event.runs_triton
    if used is not None:
        one_event.runs_triton = lambda device: used
    try:
        yield
    finally:
        one_event.runs_triton = before


def compare(**options: object) -> dict[str, object]:
    """Memory that grows, users that come and go, several new events and none, full histories, and
    weights that change in place and move."""
    model = make_model(longest=70, **options)
    pair = Pair(model, [3, 0, 40, 68])
    calls, compute = [], one_event._Step._compute

    def compute_and_note(step: one_event._Step, *arguments: object) -> torch.Tensor:
        keys = step._table[:, NewEventColumn.KEYS]
        calls.append((len(keys), int((keys != 0).sum())))
        return compute(step, *arguments)

    one_event._Step._compute = compute_and_note
    found = [
        pair.append(counts)
        for counts in ([1] * 4, [1] * 4, [1, 1], [1] * 3, [1] * 4, [0, 1, 2, 1], [1])
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    found += [pair.append([1] * 4)]
    last = model.encoder.layers[1].output
    last.weight = torch.nn.Parameter(last.weight * 1.5)
    found += [pair.append([1] * 4)]
    one_event._Step._compute = compute
    return {
        "worst": {name: max(step[name] for step in found) for name in found[0]},
        "calls": calls,
        "rebuilds": [state.rebuilds for state in pair.fast],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    incremental_state.FIRST_CAPACITY = 4
    # few programs, which still have several blocks of keys each
    triton_decode.PARTS, triton_decode.BLOCK = 2, 64
    print(json.dumps({case: compare(**options) for case, options in CASES.items()}))
