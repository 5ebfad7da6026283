"""The heads of a model: Retrieval predicts the next item, Ranking the outcome of candidates.

Both return summed losses per task; training divides them by the weight of the global batch. Their
embeddings are plain modules, called with the batch's own id tensors once per feature, and may be
replaced by any module that maps ids to rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.batch import HostSizes, Jagged, Nested, SequenceBatch, compute_offsets, concat_ranges
from freescale.config import ModelConfig
from freescale.kernels.dispatch.layer import sampled_softmax
from freescale.models.columns import (
    find_candidates,
    find_log_q,
    find_negatives,
    find_sequence,
    locate_rows,
    measure_time_span,
    sum_values,
)
from freescale.models.encoder import Encoder
from freescale.models.features import (
    NO_FEATURES,
    FeatureTables,
    ItemVectors,
    sum_features,
)
from freescale.models.sequence_head import SequenceHead, to_at_least_float32


class Retrieval(SequenceHead):
    """Next item by sampled softmax over the target and negatives.

    Reads sequences "history", "targets" (the item after each), "actions" with num_actions,
    "timestamps" with a time bias, optionally "target_weights" (0 leaves a position out). Negatives
    are the batch's "negatives", wherever it has them: of a sample in `dense` [samples, K], of a
    position in `sequences` [tokens, K], of all in `shared` [K]. A negative that is the target
    counts as absent. "negatives_log_q" in the same place and "targets_log_q" in `sequences`,
    both optional, are subtracted from the logits; without them, the item table's own estimates.
    """

    _item_features = ("history", "targets", "negatives")

    def __init__(
        self,
        encoder: Encoder,
        *,
        num_items: int,
        num_actions: int = 0,
        temperature: float = ModelConfig.temperature,
        normalize: bool = True,
        feature_tables: FeatureTables = NO_FEATURES,
        table_device: str | None = None,
    ) -> None:
        super().__init__(encoder, num_items, num_actions, feature_tables, table_device)
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, not {temperature}")
        self.temperature = temperature
        self.normalize = normalize

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture forward and backward."""
        return self.encoder.capturable and self.user_features is None

    def count_work(self, tokens: int) -> int:
        """Token values of a batch, over all layers."""
        return tokens * self.encoder.width * len(self.encoder.layers)

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        history = find_sequence(batch, "history")
        targets = find_sequence(batch, "targets", history)
        weights, targets_log_q = (
            find_sequence(batch, name, history).values if name in batch.sequences else None
            for name in ("target_weights", "targets_log_q")
        )
        negatives = find_negatives(batch, history)
        if targets_log_q is None and negatives.log_q is None:
            targets_log_q = find_log_q(self.item, targets.values)
            negatives = replace(negatives, log_q=find_log_q(self.item, negatives.index))
        items = self._describe_items(batch, self._item_features)
        outputs, context = self._encode_history(batch, items), self._embed_context(batch)
        outputs = outputs if context is None else outputs + context.to(outputs.dtype)
        if not outputs.shape[0]:
            return {"next_item": to_at_least_float32(outputs).sum()}
        if items is None:
            rows, (goals, others) = locate_rows(self.item, targets.values, negatives.index)
        else:
            rows, goals, others = items.rows, items.places["targets"], items.places["negatives"]
        total = sampled_softmax(
            outputs,
            rows,
            goals,
            replace(negatives, index=others),
            history.lengths,
            host_lengths=history.host_lengths,
            temperature=self.temperature,
            normalize=self.normalize,
            weights=weights,
            targets_log_q=targets_log_q,
        )
        return {"next_item": total}

    def encode_queries(self, batch: SequenceBatch, last_alone: bool = False) -> Tensor:
        """Encodes each history as a query, to be multiplied with `encode_items`.

        Args:
            batch: Histories.
            last_alone: Compute the last output alone where that saves time. Sums may have another
                order.

        Returns:
            [samples, width]: the last output of each history; zero without a history.
        """
        history = batch.sequences["history"]
        if not history.values.shape[0]:
            zeros = self.encoder.position.new_zeros(len(history), self.encoder.width)
            return to_at_least_float32(zeros)
        places = (history.offsets[1:] - 1).clamp(min=0)
        if last_alone:
            x, lengths, timestamps, host = self._build_inputs(batch)
            encode = self.encoder.encode_last
            last = self._encode(batch, x, lengths, batch.keys, timestamps, host=host, by=encode)
        else:
            last = self.encode_history(batch)[places]
        context = self._embed_context(batch)
        if context is not None and "context_features" in batch.sequences:
            context = context[places]
        return self.make_queries(last, context, history.lengths == 0)

    def make_queries(
        self, last: Tensor, context: Tensor | None, empty: Tensor | None = None
    ) -> Tensor:
        """[samples, width]: queries from the last outputs and the requests' context, zero for
        histories that are empty ([samples] bool)."""
        if context is not None:
            last = last + context.to(last.dtype)
        last = self._normalize_rows(last)
        return last if empty is None else last.masked_fill(empty[:, None], 0)

    def encode_items(
        self,
        rows: Tensor,
        codes: Tensor | None = None,
        own: Tensor | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Encodes items as the loss sees them: [n, width].

        Args:
            rows: [n, width] of the item table.
            codes: [n, places] rows of their features, if the model has any.
            own: [n] how much an item's own row counts, from 0 to 1.
            vectors: [n] rows of their vectors, if the model has any.
        """
        return self._normalize_rows(self.describe_rows(rows, codes, own, vectors))

    def encode_history(self, batch: SequenceBatch) -> Tensor:
        """Outputs of the encoder for every event: [tokens, width]."""
        return self._encode_history(batch, None)

    def _encode_history(self, batch: SequenceBatch, items: ItemVectors | None) -> Tensor:
        x, lengths, timestamps, host = self._build_inputs(batch, items)
        return self._encode(batch, x, lengths, batch.keys, timestamps, host=host)

    def _embed_context(self, batch: SequenceBatch) -> Tensor | None:
        """[requests, width]: of the request that follows each position, or each history. It joins
        the query behind the encoder, so that no other position sees it."""
        if self.context_features is None:
            return None
        return sum_features(self.context_features, batch.values("context_features"))

    def _normalize_rows(self, rows: Tensor) -> Tensor:
        rows = to_at_least_float32(rows)
        return F.normalize(rows, dim=-1) if self.normalize else rows


class Ranking(SequenceHead):
    """Several binary tasks on candidates: each is judged against the history alone, not against the
    others.

    Reads sequences "history", "actions" with num_actions, "timestamps" with a time bias (and
    "candidate_timestamps"; without them a candidate has the time of the last event), "labels"
    [candidates, tasks]; candidates "candidates", whose items are summed.
    """

    _item_features = ("history", "candidates")

    def __init__(
        self,
        encoder: Encoder,
        *,
        num_items: int,
        tasks: Sequence[str],
        num_actions: int = 0,
        feature_tables: FeatureTables = NO_FEATURES,
        table_device: str | None = None,
    ) -> None:
        super().__init__(encoder, num_items, num_actions, feature_tables, table_device)
        if not tasks or len(set(tasks)) != len(tasks):
            raise ValueError(f"tasks must be different names, at least one, not {list(tasks)}")
        self.tasks = tuple(tasks)
        self.judge: nn.Module = nn.Linear(encoder.width, len(self.tasks))

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        candidates = find_candidates(batch).outer
        labels = find_sequence(batch, "labels", candidates).values
        if labels.shape != (candidates.values.shape[0], len(self.tasks)):
            raise ValueError(
                f"'labels' must be [{candidates.values.shape[0]}, "
                f"{len(self.tasks)}], not {list(labels.shape)}"
            )
        logits = self._compute_logits(batch)
        losses = F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        ).sum(0)
        return dict(zip(self.tasks, losses.unbind(), strict=True))

    def predict(self, batch: SequenceBatch) -> Tensor:
        """[candidates, tasks]: the probability of every task for every candidate."""
        return self._compute_logits(batch).sigmoid()

    def _compute_logits(self, batch: SequenceBatch) -> Tensor:
        history, candidates = find_sequence(batch, "history"), find_candidates(batch)
        items = self._describe_items(batch, self._item_features)
        x = self._embed_events(batch, history, items)
        offered = self.item(candidates.values) if items is None else items.read("candidates")
        rows = sum_values(to_at_least_float32(offered), candidates.inner)
        if self.context_features is not None:  # a candidate's token, which no other token sees
            given = find_sequence(batch, "context_features", candidates.outer).values
            rows = rows + sum_features(self.context_features, given).to(rows.dtype)
        lengths, counts = history.lengths + candidates.counts, candidates.counts
        starts = compute_offsets(lengths)[:-1]
        # [candidates]: after the sample's history
        places = concat_ranges(starts + history.lengths, counts, rows.shape[0])
        order = torch.cat([concat_ranges(starts, history.lengths, x.shape[0]), places])
        x = torch.cat([x.to(rows.dtype), rows])
        x = torch.empty_like(x).index_copy(0, order, x)
        timestamps, span = (
            self._merge_timestamps(batch, history, candidates, order)
            if self.encoder.has_time_bias
            else (None, None)
        )
        host_counts = candidates.outer.host_lengths
        host = HostSizes(history.host_lengths + host_counts, host_counts, span)
        inputs = x, lengths, batch.keys, timestamps, counts, host
        outputs = self._encode(batch, *inputs)
        return to_at_least_float32(self.judge(outputs.index_select(0, places)))

    def _merge_timestamps(
        self, batch: SequenceBatch, history: Jagged, candidates: Nested, order: Tensor
    ) -> tuple[Tensor, int | None]:
        """[tokens] times in the encoder's order, and their span if the host knows it."""
        past = find_sequence(batch, "timestamps", history)
        times, span = self._find_candidate_times(batch, history, candidates)
        both = torch.cat([past.values, times])
        return torch.empty_like(both).index_copy(0, order, both), span

    def _find_candidate_times(
        self, batch: SequenceBatch, history: Jagged, candidates: Nested
    ) -> tuple[Tensor, int | None]:
        """[candidates] times, and the span of all times if the host knows it."""
        past = find_sequence(batch, "timestamps", history)
        span = measure_time_span(past)
        if "candidate_timestamps" in batch.sequences:
            given = find_sequence(batch, "candidate_timestamps", candidates.outer)
            times, span = given.values, measure_time_span(past, given)
        elif past.values.shape[0]:
            # without a history a candidate sees itself only: any time will do
            last = past.values[(past.offsets[1:] - 1).clamp(min=0)]
            times = torch.repeat_interleave(
                last, candidates.counts, output_size=candidates.lengths.numel()
            )
        else:
            times = past.values.new_zeros(candidates.lengths.numel())
        return times, span
