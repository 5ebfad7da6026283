"""What a model is trained for: Retrieval (which item is next) and Ranking (what becomes of these
candidates).

Both return sums per task; who trains them divides by the weight of the global batch. Their
embeddings are plain modules called with the batch's own id tensors, once per feature, and may be
swapped for any module that maps ids to rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.batch import HostSizes, Jagged, Nested, SequenceBatch, offsets_of, ranges
from freescale.config import ModelConfig
from freescale.kernels.groups import Groups
from freescale.models.hstu import HSTU
from freescale.models.segments import Memory, SegmentedHSTU

LOGIT_BUDGET = 1 << 18  # logits at a time: about a core's cache


class _Sequential(nn.Module):
    """Item and action tables in front of the encoder. Tables on the meta device need no memory
    until somebody shards them."""

    def __init__(
        self, encoder: HSTU, num_items: int, num_actions: int, table_device: str | None
    ) -> None:
        super().__init__()
        if num_items < 1 or num_actions < 0:
            raise ValueError(
                "num_items must be at least 1 and num_actions at least 0, not "
                f"{num_items} and {num_actions}"
            )
        self.item = nn.Embedding(num_items, encoder.width, device=table_device)
        self.action = (
            nn.Embedding(num_actions, encoder.width, device=table_device) if num_actions else None
        )
        self.encoder = encoder
        for table in (self.item, self.action):
            if table is not None:
                nn.init.normal_(table.weight, std=encoder.width**-0.5)

    def _events(self, batch: SequenceBatch, history: Jagged) -> Tensor:
        """Events of the histories before the encoder [tokens, width]."""
        x = self.item(history.values)
        if self.action is not None:
            x = x + self.action(_sequence(batch, "actions", history).values)
        return x

    def _inputs(self, batch: SequenceBatch) -> tuple[Tensor, Tensor, Tensor | None, HostSizes]:
        """Of the encoder, for the histories: events, lengths, timestamps, and what the host
        knows."""
        history = _sequence(batch, "history")
        x, timestamps, span = self._events(batch, history), None, None
        if self.encoder.has_time_bias:
            times = _sequence(batch, "timestamps", history)
            timestamps, span = times.values, _time_span(times)
        return x, history.lengths, timestamps, HostSizes(history.host_lengths, time_span=span)

    def compress(self, batch: SequenceBatch, memory: Memory | None = None) -> Memory:
        """What stays of these histories, whole segments each, and of `memory` before them. For
        encoders with segments."""
        return self._segmented().compress(*self._inputs(batch), memory)

    def _segmented(self) -> SegmentedHSTU:
        if not isinstance(self.encoder, SegmentedHSTU):
            raise ValueError(
                "only an encoder with segments compresses and remembers histories; "
                "build the model with SegmentedHSTU"
            )
        return self.encoder

    def _encode(self, *inputs: Any, memory: Memory | None = None, **options: Any) -> Tensor:
        return (
            self.encoder(*inputs, **options)
            if memory is None
            else self._segmented()(*inputs, memory=memory, **options)
        )


class Retrieval(_Sequential):
    """Next item by sampled softmax over the target and the sample's own negatives.

    Reads sequences "history", "targets" (the item after each), "actions" with num_actions,
    "timestamps" with a time bias, optionally "target_weights" (0 leaves a position out); dense
    "negatives" [samples, K], shared by the positions of a sample. A negative that is the target
    counts as absent.
    """

    def __init__(
        self,
        encoder: HSTU,
        *,
        num_items: int,
        num_actions: int = 0,
        temperature: float = ModelConfig.temperature,
        normalize: bool = True,
        table_device: str | None = None,
    ) -> None:
        super().__init__(encoder, num_items, num_actions, table_device)
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, not {temperature}")
        self.temperature = temperature
        self.normalize = normalize

    @property
    def features(self) -> dict[str, list[str]]:
        """Which batch features each table reads."""
        actions = {} if self.action is None else {"action": ["actions"]}
        return {"item": ["history", "targets", "negatives"]} | actions

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        history = _sequence(batch, "history")
        targets = _sequence(batch, "targets", history)
        weights = (
            _sequence(batch, "target_weights", history).values
            if "target_weights" in batch.sequences
            else None
        )
        negatives = batch.values("negatives")
        if negatives.ndim != 2 or negatives.shape[1] < 1:
            raise ValueError(
                f"'negatives' must be [samples, K] with K at least 1, not {list(negatives.shape)}"
            )
        outputs = self._directed(self._encoded(batch)) / self.temperature  # [tokens, width]
        # [tokens]
        positive = (outputs * self._directed(self.item(targets.values)).to(outputs.dtype)).sum(1)
        rows = self._directed(self.item(negatives)).to(outputs.dtype)  # [samples, K, width]
        need_grad = torch.is_grad_enabled()
        total = _SampledSoftmax.apply(
            outputs, positive, rows, targets, negatives, weights, need_grad
        )
        return {"next_item": total}

    def queries(self, batch: SequenceBatch, memory: Memory | None = None) -> Tensor:
        """[samples, width]: each history's last output, to be multiplied with `catalogue`; zero
        without a history. With a `memory` the batch holds what came after it."""
        outputs = self._directed(self._encoded(batch, memory))
        history = batch.sequences["history"]
        if not outputs.shape[0]:
            return outputs.new_zeros(len(history), outputs.shape[1])
        last = outputs[(history.offsets[1:] - 1).clamp(min=0)]
        return last.masked_fill((history.lengths == 0)[:, None], 0)

    def catalogue(self, rows: Tensor) -> Tensor:
        """Item rows [n, width] as the loss sees them."""
        return self._directed(rows)

    def _encoded(self, batch: SequenceBatch, memory: Memory | None = None) -> Tensor:
        x, lengths, timestamps, host = self._inputs(batch)
        return self._encode(x, lengths, batch.keys, timestamps, host=host, memory=memory)

    def _directed(self, rows: Tensor) -> Tensor:
        rows = _at_least_float32(rows)
        return F.normalize(rows, dim=-1) if self.normalize else rows


class Ranking(_Sequential):
    """Several binary tasks on candidates: each is judged against the history alone, not against the
    others.

    Reads sequences "history", "actions" with num_actions, "timestamps" with a time bias (and
    "candidate_timestamps"; without them a candidate has the time of the last event), "labels"
    [candidates, tasks]; candidates "candidates", whose items are summed.
    """

    def __init__(
        self,
        encoder: HSTU,
        *,
        num_items: int,
        tasks: Sequence[str],
        num_actions: int = 0,
        table_device: str | None = None,
    ) -> None:
        super().__init__(encoder, num_items, num_actions, table_device)
        if not tasks or len(set(tasks)) != len(tasks):
            raise ValueError(f"tasks must be different names, at least one, not {list(tasks)}")
        self.tasks = tuple(tasks)
        self.judge = nn.Linear(encoder.width, len(self.tasks))

    @property
    def features(self) -> dict[str, list[str]]:
        """Which batch features each table reads."""
        actions = {} if self.action is None else {"action": ["actions"]}
        return {"item": ["history", "candidates"]} | actions

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        candidates = _candidates(batch).outer
        labels = _sequence(batch, "labels", candidates).values
        if labels.shape != (candidates.values.shape[0], len(self.tasks)):
            raise ValueError(
                f"'labels' must be [{candidates.values.shape[0]}, "
                f"{len(self.tasks)}], not {list(labels.shape)}"
            )
        logits = self._logits(batch)
        losses = F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        ).sum(0)
        return dict(zip(self.tasks, losses.unbind(), strict=True))

    def predictions(self, batch: SequenceBatch, memory: Memory | None = None) -> Tensor:
        """[candidates, tasks] probabilities. With a `memory` the batch's histories hold what came
        after it."""
        return self._logits(batch, memory).sigmoid()

    def _logits(self, batch: SequenceBatch, memory: Memory | None = None) -> Tensor:
        history, candidates = _sequence(batch, "history"), _candidates(batch)
        x, rows = (
            self._events(batch, history),
            _summed(_at_least_float32(self.item(candidates.values)), candidates.inner),
        )
        lengths, counts = history.lengths + candidates.counts, candidates.counts
        starts = offsets_of(lengths)[:-1]
        # [candidates]: after the sample's history
        places = ranges(starts + history.lengths, counts, rows.shape[0])
        order = torch.cat([ranges(starts, history.lengths, x.shape[0]), places])
        x = torch.cat([x.to(rows.dtype), rows])
        x = torch.empty_like(x).index_copy(0, order, x)
        timestamps, span = (
            self._timestamps(batch, history, candidates, order)
            if self.encoder.has_time_bias
            else (None, None)
        )
        host_counts = candidates.outer.host_lengths
        host = HostSizes(history.host_lengths + host_counts, host_counts, span)
        outputs = self._encode(x, lengths, batch.keys, timestamps, counts, host, memory=memory)
        return _at_least_float32(self.judge(outputs.index_select(0, places)))

    def _timestamps(
        self, batch: SequenceBatch, history: Jagged, candidates: Nested, order: Tensor
    ) -> tuple[Tensor, int | None]:
        """[tokens] times in the encoder's order, and their span if the host knows it."""
        past = _sequence(batch, "timestamps", history)
        span = _time_span(past)
        if "candidate_timestamps" in batch.sequences:
            given = _sequence(batch, "candidate_timestamps", candidates.outer)
            times, span = given.values, _time_span(past, given)
        elif past.values.shape[0]:
            # without a history a candidate sees itself only: any time will do
            last = past.values[(past.offsets[1:] - 1).clamp(min=0)]
            times = torch.repeat_interleave(
                last, candidates.counts, output_size=candidates.lengths.numel()
            )
        else:
            times = past.values.new_zeros(candidates.lengths.numel())
        both = torch.cat([past.values, times])
        return torch.empty_like(both).index_copy(0, order, both), span


class _SampledSoftmax(torch.autograd.Function):
    """Sum over tokens of weight * -log(softmax of the target among target and negatives).

    Gradients are made together with the loss, a tile of logits at a time, so that no [tokens, K] is
    ever kept.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        outputs,  # [tokens, width], divided by the temperature
        positive,  # [tokens]: the targets' logits
        rows,  # [samples, K, width]
        targets,  # Jagged: ids, one per token
        negatives,  # [samples, K] ids
        weights,  # [tokens] or None
        need_grad,
    ):
        if need_grad:
            grad_outputs, grad_positive, grad_rows = (
                torch.zeros_like(t) for t in (outputs, positive, rows)
            )
        loss = torch.zeros_like(positive)
        cost = lambda length: length * negatives.shape[1]  # noqa: E731
        groups = Groups.of(targets.lengths, cost, LOGIT_BUDGET, targets.host_lengths.numpy())
        with torch.autocast(outputs.device.type, enabled=False):
            for group in groups.groups:
                x = group.pad(outputs)  # [n, length, width]
                others = rows[group.samples]  # [n, K, width]
                hit = group.pad(targets.values)[:, :, None] == negatives[group.samples][:, None, :]
                own = group.pad(positive)[:, :, None]
                logits = torch.bmm(x, others.transpose(1, 2).contiguous())  # [n, length, K]
                logits.masked_fill_(hit, -torch.inf)
                top = torch.maximum(logits.amax(2, keepdim=True), own)
                logits.sub_(top).exp_()
                total = (own - top).exp_().add_(logits.sum(2, keepdim=True))  # [n, length, 1]
                loss[group.tokens] = group.unpad((total.log() + top - own)[:, :, 0])
                if need_grad:
                    # softmax without the target; where padding has some, its x is 0
                    shares = logits.div_(total)
                    if weights is not None:
                        shares.mul_(group.pad(weights)[:, :, None])
                    grad_outputs[group.tokens] = group.unpad(torch.bmm(shares, others))
                    grad_positive[group.tokens] = -group.unpad(shares.sum(2))
                    grad_rows[group.samples] = torch.bmm(shares.transpose(1, 2), x)
        if need_grad:
            ctx.save_for_backward(grad_outputs, grad_positive, grad_rows)
        return loss.sum() if weights is None else (loss * weights).sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *(part * grad for part in ctx.saved_tensors), None, None, None, None


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sequence(batch: SequenceBatch, name: str, like: Jagged | None = None) -> Jagged:
    """A sequence of the batch, with the lengths of `like`."""
    if name not in batch.sequences:
        raise ValueError(
            f"the batch has no sequence {name!r}; it has "
            f"{', '.join(sorted(batch.sequences)) or 'none'}"
        )
    part = batch.sequences[name]
    part.check(name)
    if like is None or part.lengths is like.lengths:
        return part
    own, theirs = part.host_lengths, like.host_lengths
    if not torch.equal(own, theirs):
        sample = int((own != theirs).nonzero()[0])
        raise ValueError(
            f"{name!r} has {int(own[sample])} values in sample {sample}, "
            f"what it goes with has {int(theirs[sample])}; they must be equal"
        )
    return part


def _time_span(*parts: Jagged) -> int | None:
    """The longest time between two events of a sample, in whichever part; None if the host does not
    know."""
    hosts = [part.host for part in parts if part.host is not None]
    if len(hosts) < len(parts):
        return None
    ends = np.iinfo(np.int64)
    low, high = np.full(len(parts[0]), ends.max), np.full(len(parts[0]), ends.min)
    for host in hosts:
        lengths, times = host.lengths.numpy(), host.values.numpy()
        some = lengths > 0
        starts = (np.cumsum(lengths) - lengths)[some]
        if starts.size:
            low[some] = np.minimum(low[some], np.minimum.reduceat(times, starts))
            high[some] = np.maximum(high[some], np.maximum.reduceat(times, starts))
    some = high >= low
    return int((high[some] - low[some]).max(initial=0))


def _summed(rows: Tensor, of: Jagged) -> Tensor:
    """[values, width] -> [candidates, width]: the sum of each candidate's rows, in an order that is
    fixed on every device."""
    if not rows.shape[0]:
        return torch.cat([rows, rows.new_zeros(len(of), rows.shape[1])])
    # unsafe: torch would check the lengths where they are, on the device; the host has checked them
    return torch.segment_reduce(rows, "sum", lengths=of.lengths, axis=0, initial=0.0, unsafe=True)


def _candidates(batch: SequenceBatch) -> Nested:
    if "candidates" not in batch.candidates:
        raise ValueError(
            f"the batch has no 'candidates'; it has {', '.join(sorted(batch.candidates)) or 'none'}"
        )
    batch.candidates["candidates"].check("candidates")
    return batch.candidates["candidates"]
