"""Batches from plain lists of samples and back, and any such list."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from freescale.batch import Jagged, Nested, SequenceBatch

DRAWN = [3, 1, 2]  # what the batch as a whole has


def build_batch(samples: list[dict]) -> SequenceBatch:
    """A batch from a list of plain samples."""
    ints = lambda values: torch.tensor(values, dtype=torch.int64)  # noqa: E731
    histories = [s["history"] for s in samples]
    candidates = [s["candidates"] for s in samples]
    flat = [c for group in candidates for c in group]
    return SequenceBatch(
        sequences={
            "history": Jagged(
                ints([v for h in histories for v in h]), ints([len(h) for h in histories])
            ),
            "scores": Jagged(
                torch.tensor([[v / 2, -v] for h in histories for v in h], dtype=torch.float32).view(
                    -1, 2
                ),
                ints([len(h) for h in histories]),
            ),
        },
        candidates={
            "candidates": Nested(
                ints([v for c in flat for v in c]),
                ints([len(c) for c in flat]),
                ints([len(g) for g in candidates]),
            )
        },
        dense={"label": torch.tensor([s["label"] for s in samples], dtype=torch.bool)},
        weights={"click": torch.tensor([float(len(s["history"])) for s in samples])},
        keys=ints([s["key"] for s in samples]),
        number=7,
        shared={"drawn": ints(DRAWN)},
    )


def list_samples(batch: SequenceBatch) -> list[dict]:
    """The inverse of `build_batch`, by loops."""
    samples, history, outer, inner = [], 0, 0, 0
    nested = batch.candidates["candidates"]
    for i in range(len(batch)):
        length = int(batch.sequences["history"].lengths[i])
        tokens = batch.sequences["history"].values[history : history + length].tolist()
        scores = batch.sequences["scores"].values[history : history + length].tolist()
        assert scores == [[v / 2, -v] for v in tokens]
        history += length
        candidates = []
        for size in nested.lengths[outer : outer + int(nested.counts[i])].tolist():
            candidates.append(nested.values[inner : inner + size].tolist())
            inner += size
        outer += int(nested.counts[i])
        assert float(batch.weights["click"][i]) == length
        samples.append(
            {
                "history": tokens,
                "candidates": candidates,
                "label": bool(batch.dense["label"][i]),
                "key": int(batch.keys[i]),
            }
        )
    assert not samples or batch.shared["drawn"].tolist() == DRAWN
    assert history == batch.sequences["history"].values.numel() and inner == nested.values.numel()
    return samples


ids = st.integers(0, 1000)
sample = st.fixed_dictionaries(
    {
        "history": st.lists(ids, max_size=6),
        "candidates": st.lists(st.lists(ids, max_size=3), max_size=4),
        "label": st.booleans(),
        "key": st.integers(-(2**63), 2**63 - 1),
    }
)
samples = st.lists(sample, max_size=7)
