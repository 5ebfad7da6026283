"""The attention of a layer's rows to the summaries of earlier segments."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.summary_attention.dispatch import attend_to_summaries
from freescale.kernels.upload import upload
from freescale.models.hstu_layer import HSTULayer
from freescale.models.segments.arrangement import Rows
from freescale.models.segments.memory import Memory


class EarlierSegments:
    """Attends from a layer's rows to the summaries of earlier segments.

    Args:
        rows: Where events and summaries stand.
        memory: Summaries of segments before the first row.
        weight: How many events a summary counts for.
        keep: Whether to keep the keys and values of all summaries, layer by layer, in `kept`.
    """

    def __init__(
        self, rows: Rows, memory: Memory | None, weight: float, keep: bool = False
    ) -> None:
        self.rows, self.memory, self.weight = rows, memory, weight
        self.kept: list[tuple[Tensor, Tensor]] | None = [] if keep else None
        self._order: Tensor | None = None
        if memory is not None and not rows.open:  # remembered ones first, sample by sample
            plan, tokens = rows.plan, rows.plan.segments.tokens
            owners = [
                np.repeat(np.arange(len(count)), count * tokens)
                for count in (plan.known, plan.closed)
            ]
            self._order = upload(
                np.argsort(np.concatenate(owners), kind="stable"), rows.lengths.device
            )

    def attend(
        self, layer: HSTULayer, plan: AttentionPlan | TilePlan, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor | None:
        """q [rows, heads, d_qk], k and v of the same rows -> [rows, heads, d_v]; None without
        summaries."""
        k, v = self._collect_summaries(layer, k, v)
        if self.kept is not None:
            self.kept.append((k, v))
        if not k.shape[0]:
            return None
        scale_length = layer.max_length / self.weight
        return attend_to_summaries(
            plan, q, k, v, self.rows.plan, scale_length=scale_length, alpha=layer.d_qk**-0.5
        )

    def _collect_summaries(self, layer: HSTULayer, *of_rows: Tensor) -> tuple[Tensor, ...]:
        """Keys and values [summaries, heads, d] of all summaries, from those of the rows and the
        remembered ones."""
        if self.memory is None:
            return tuple(part.index_select(0, self.rows.summaries) for part in of_rows)
        remembered = self.memory.keys[layer.number], self.memory.values[layer.number]
        if self._order is None:
            return remembered
        found = [part.index_select(0, self.rows.summaries) for part in of_rows]
        return tuple(
            torch.cat(pair).index_select(0, self._order)
            for pair in zip(remembered, found, strict=True)
        )
