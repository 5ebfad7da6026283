"""The plan of the reference attention in C, for batches whose pairs of tokens it lists."""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from freescale.batch import HostSizes
from freescale.kernels.attention.pairs import Pairs
from freescale.kernels.attention.plan import BUCKET_WIDTH, AttentionPlan
from freescale.kernels.groups import Groups
from freescale.kernels.native import address, load_native, require_native
from freescale.visible import Visible

# Scores (heads * pairs of tokens) up to which a list of pairs pays in C. Above, matrix products of
# padded groups take less time per score.
LISTED_SCORES = 1 << 15


def is_available(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether there is C code for tensors on this one's device, with products in `dtype`."""
    return dtype == torch.float32 and tensor.device.type == "cpu" and load_native() is not None


def plan_attention(
    lengths: Tensor, heads: int, listed_scores: int, *, candidate_counts: Tensor | None = None,
    timestamps: Tensor | None = None, buckets: int = 0, distances: bool = False,
    host: HostSizes | None = None, visible: Visible | None = None,
) -> AttentionPlan | None:  # fmt: skip
    """As the reference, on a CPU. Returns None if there are too many pairs for a list, and for
    arguments that the reference refuses."""
    counts, samples = candidate_counts, lengths.numel()
    known = host or HostSizes(lengths, counts)
    columns = lengths, counts, known.lengths, known.candidate_counts
    fits = heads > 0 and (counts is None) == (known.candidate_counts is None)
    if not fits or not all(c is None or _is_column(c, samples) for c in columns):
        return None
    library, found = require_native(), (c_int64 * 4)()
    seen = (0, 0) if visible is None else (visible.first, visible.last)
    sizes = samples, *map(address, columns[:2]), *seen
    if not library.measure_samples(*sizes, found) or heads * found[1] > listed_scores:
        return None
    tokens, number, longest_history, longest_distance = found
    if timestamps is not None and not _is_column(timestamps, tokens):
        return None
    pairs = Pairs(*lengths.new_empty(3, number).unbind())
    bucket = None if timestamps is None else lengths.new_empty(number, dtype=torch.int32)
    library.list_pairs(
        *sizes, address(timestamps), BUCKET_WIDTH, buckets,
        *map(address, (pairs.query, pairs.key, pairs.distance, bucket)),
    )  # fmt: skip
    return AttentionPlan(
        lengths, heads, tokens, counts, timestamps, buckets, distances, longest_history,
        longest_distance, visible, Groups((), lengths, lengths.numpy(), tokens), pairs=pairs,
        bucket=bucket,
    )  # fmt: skip


def _is_column(tensor: Tensor, size: int) -> bool:
    """Whether C can read it: [size] int64."""
    here = tensor.device.type == "cpu" and tensor.is_contiguous()
    return here and tensor.dtype == torch.int64 and tensor.shape == (size,)
