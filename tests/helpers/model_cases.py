"""A batch for both heads, and a model's losses and gradients on it."""

from __future__ import annotations

import torch

from freescale.batch import Jagged, Nested, SequenceBatch

ITEMS, ACTIONS, WIDTH, NEGATIVES, TASKS = 30, 4, 8, 7, ("click", "like")
LENGTHS, COUNTS = [5, 0, 1, 12, 3, 12], [3, 2, 0, 5, 1, 2]


def batch_of(lengths=LENGTHS, counts=COUNTS, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def integers(bound, *shape):
        return torch.randint(0, bound, shape, generator=generator)

    lengths = torch.tensor(lengths, dtype=torch.int64)
    counts = torch.tensor(counts, dtype=torch.int64)
    tokens, candidates = int(lengths.sum()), int(counts.sum())
    inner = integers(4, candidates)  # some candidates have no value at all
    return SequenceBatch(
        sequences={
            "history": Jagged(integers(ITEMS, tokens), lengths),
            "targets": Jagged(integers(ITEMS, tokens), lengths),
            "actions": Jagged(integers(ACTIONS, tokens), lengths),
            "timestamps": Jagged(integers(1000, tokens).cumsum(0), lengths),
            "candidate_timestamps": Jagged(integers(100, candidates) + 10**5, counts),
            "labels": Jagged(integers(2, candidates, len(TASKS)), counts),
        },
        candidates={"candidates": Nested(integers(ITEMS, int(inner.sum())), inner, counts)},
        dense={"negatives": integers(ITEMS, len(lengths), NEGATIVES)},
        keys=integers(2**60, len(lengths)),
    ).check()


def losses_and_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    losses = model(batch)
    sum(losses.values()).backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    return {n: loss.detach() for n, loss in losses.items()} | grads


def assert_equal(mine, expected, tolerance=1e-12):
    assert mine.keys() == expected.keys()
    for name in mine:
        scale = max(1.0, float(expected[name].abs().max()))
        assert float((mine[name] - expected[name]).abs().max()) <= tolerance * scale, name
