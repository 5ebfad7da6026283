"""The head of a DLRM with HSTU: networks make tokens of events, of candidates and of the request's
context, and judge what the encoder makes of a candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freescale.batch import HostSizes, Jagged, Nested, SequenceBatch, compute_offsets, concat_ranges
from freescale.kernels.attention.plan import AttentionPlan
from freescale.kernels.attention.triton_plan import TilePlan
from freescale.kernels.dispatch.layer import add_encodings, norm_rows, swish_norm
from freescale.kernels.dispatch.rows import read_rows as read_vectors
from freescale.kernels.layer.reference import compute_positions, derive_token_keys
from freescale.models.columns import find_candidates, find_sequence, read_rows
from freescale.models.features import NO_FEATURES, FeatureTables
from freescale.models.heads import Ranking
from freescale.models.hstu import HSTU
from freescale.models.sequence_head import to_at_least_float32


class DlrmHSTU(HSTU):
    """[tokens, width] -> [tokens, width] over jagged samples, each with its context first, then its
    history, then its candidates.

    Context tokens are tokens like others: causal, and seen by all that follow. Positions are
    counted backwards from the candidates, after `context` positions for the context itself. The
    time before the last candidate's falls into a bucket. Rows for both are added to the inputs,
    which are multiplied by the square root of the width before. Times are seconds, those of context
    0. `max_length` is of context and history.
    """

    def __init__(
        self,
        *,
        width: int,
        context: int,  # tokens of context
        positions: int,
        time_buckets: int,
        **options: Any,  # of HSTU
    ) -> None:
        super().__init__(width=width, position_bias=False, time_bias=False, wide=True, **options)
        if context < 0 or positions <= context or time_buckets < 1:
            raise ValueError(
                "positions must be more than the context's and time_buckets at least 1, not "
                f"{positions}, {context} and {time_buckets}"
            )
        self.context = context
        self.position = _draw_rows(positions, positions, width)
        self.time = _draw_rows(time_buckets + 1, time_buckets, width)

    def forward(
        self,
        x: Tensor,  # [tokens, width]
        lengths: Tensor,  # [samples] int64, context and candidates included
        keys: Tensor | None = None,  # [samples] int64
        timestamps: Tensor | None = None,  # [tokens] int64
        candidate_counts: Tensor | None = None,  # [samples] int64
        host: HostSizes | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:  # [tokens, width]
        if prefix is not None or timestamps is None:
            raise ValueError("a DLRM encoder needs timestamps, and takes context as tokens of x")
        self._check_width(x)
        plan = self._plan_attention(lengths, candidate_counts, None, host)
        self._check_sizes(x, plan.tokens, plan.longest_history)
        if not plan.tokens:
            return x.to(self.position.dtype)
        x, token_keys = self._encode_inputs(plan, x, timestamps, keys)
        return self._run_layers(x, lengths, token_keys, None, candidate_counts, plan)

    def _encode_inputs(
        self, plan: AttentionPlan | TilePlan, x: Tensor, timestamps: Tensor, keys: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Inputs of the first layer, and the tokens' keys if anything is dropped."""
        lengths, counts, tokens = plan.lengths, plan.candidate_counts, x.shape[0]
        ends = (lengths.cumsum(0) - 1).clamp(min=0)
        before = lengths if counts is None else lengths - counts  # the candidates
        each = torch.stack([before, timestamps[ends]], dim=1)
        history, now = torch.repeat_interleave(each, lengths, 0, output_size=tokens).unbind(1)
        slots = compute_positions(lengths, tokens)
        backwards = (history - slots).clamp(min=0) + self.context
        places = torch.where(
            slots < self.context, slots, backwards.clamp(max=self.position.shape[0] - 1)
        )
        buckets = find_time_buckets(now - timestamps, self.time.shape[0] - 1)
        chosen = self._choose_keys(keys, lengths)
        token_keys = None if chosen is None else derive_token_keys(chosen, lengths, slots)
        inputs = add_encodings(
            x, self.position, self.time, places, buckets, token_keys, scale=self.input_scale,
            keep=1 - self.input_dropout,
        )  # fmt: skip
        return inputs, token_keys


def _draw_rows(rows: int, count: int, width: int) -> nn.Parameter:
    """Rows [rows, width], uniform up to 1 / sqrt(count)."""
    parameter, bound = nn.Parameter(torch.empty(rows, width)), count**-0.5
    nn.init.uniform_(parameter, -bound, bound)
    return parameter


def find_time_buckets(elapsed: Tensor, last: int) -> Tensor:
    """Seconds [...] before the request -> bucket [...] int64: the root of the minutes, at most
    `last`."""
    minutes = elapsed.clamp(min=0).to(torch.float32) / 60
    return minutes.sqrt().long().clamp(max=last)


ACTION_WIDTH, ACTION_STD = 8, 0.1  # of the vector of each bit of an action


class DlrmRanking(Ranking):
    """Several binary tasks on candidates, as in MLPerf's dlrm_v4_hstu.

    Reads the columns of `Ranking`. Features are not summed but stand side by side: "history" and
    "candidates" with "NAME_features" [., places], "actions" as bits, "timestamps" and
    "candidate_timestamps" in seconds. "context_features" [candidates, places] are tokens before the
    history, one for each place, which is why candidates of a sample must share them. A candidate is
    a single item. Row 0 of a feature is a row like others.
    """

    encoder: DlrmHSTU

    def __init__(
        self,
        encoder: DlrmHSTU,
        *,
        num_items: int,
        tasks: Sequence[str],
        num_actions: int = 0,
        feature_tables: FeatureTables = NO_FEATURES,
        table_device: str | None = None,
        input_hidden: int,  # of the networks before the encoder
        head_hidden: int,  # of the networks after it
    ) -> None:
        tables = feature_tables
        if tables.event or tables.user or tables.vectors:
            raise ValueError(
                "a DLRM reads features of items and of requests: leave features of events and "
                "vectors of items out, and give attributes of users with the requests"
            )
        for rows, places in ((tables.item, tables.item_places), (tables.context, encoder.context)):
            if bool(rows) != bool(places):
                raise ValueError(
                    f"a table of {rows} rows with {places} places: FeatureTables needs item_places "
                    "with item, and context_places with context"
                )
        if encoder.context != tables.context_places:
            raise ValueError(
                f"the encoder has {encoder.context} tokens of context, but requests have "
                f"{tables.context_places} places"
            )
        super().__init__(
            encoder,
            num_items=num_items,
            tasks=tasks,
            feature_tables=tables,
            table_device=table_device,
        )
        width = encoder.width
        side = tables.item_places * width
        inside = nn.init.xavier_normal_
        self.content = make_network((width, input_hidden, width), inside)
        self.additional = make_network((side, input_hidden, width), inside) if side else None
        self.bits = (num_actions - 1).bit_length() if num_actions else 0
        if self.bits:
            wide = self.bits * ACTION_WIDTH
            self.action_bits = nn.Parameter(torch.empty(self.bits, ACTION_WIDTH))
            self.no_action = nn.Parameter(torch.empty(1, wide))  # of a candidate
            for parameter in (self.action_bits, self.no_action):
                nn.init.normal_(parameter, std=ACTION_STD)
            self.action_network = make_network((wide, input_hidden, width), inside)
        if encoder.context:
            self.context_weight = nn.Parameter(torch.empty(encoder.context, width, width))
            self.context_bias = nn.Parameter(torch.zeros(encoder.context, width))
            nn.init.normal_(self.context_weight, std=width**-0.5)
        self.time_network = nn.Sequential(
            make_linear(width + 2 * len(CYCLES), width, inside), RowNorm(width, eps=EPS)
        )
        judging = nn.init.xavier_uniform_
        self.candidate_network = make_network((width + side, head_hidden, width), judging)
        self.judge = make_network((width, head_hidden, len(self.tasks)), judging, norm=False)

    @property
    def input_weights(self) -> int:
        """Weights of the networks that make a token of an event."""
        networks = [self.content, *([] if self.additional is None else [self.additional])]
        parameters = [p for network in networks for p in network.parameters()]
        return sum(parameter.numel() for parameter in parameters if parameter.ndim == 2)

    def _compute_logits(self, batch: SequenceBatch) -> Tensor:
        history, candidates = find_sequence(batch, "history"), find_candidates(batch)
        _require_single_items(candidates)
        vectors, side = self._read(batch, "history")
        offered, offered_side = self._read(batch, "candidates")
        past, present = self._embed_actions(batch, history)
        events = self._embed(vectors, side, past)
        parts = [events, self._embed(offered, offered_side, present)]
        context = self._embed_requests(batch, candidates)
        parts += [] if context is None else [context.to(events.dtype)]
        order, places = self._order(history, candidates)
        x: Tensor = Permute.apply(torch.cat(parts), order)  # type: ignore[no-untyped-call]
        given, _ = self._find_candidate_times(batch, history, candidates)
        times = torch.cat([find_sequence(batch, "timestamps", history).values, given])
        before = times.new_zeros(order.numel() - times.numel())  # of context
        times = torch.empty_like(order).index_copy(0, order, torch.cat([times, before]))
        counts, on_host = candidates.counts, candidates.outer.host_lengths
        host = HostSizes(history.host_lengths + on_host + self.encoder.context, on_host)
        lengths = history.lengths + counts + self.encoder.context
        outputs = self.encoder(x, lengths, batch.keys, times, counts, host)
        found = outputs.index_select(0, places)
        found = self.time_network(torch.cat([found, find_phases(given).to(found.dtype)], dim=1))
        # read again: gradients of two uses are summed with those of the rows, in their dtype
        item = self.candidate_network(_join(*self._read(batch, "candidates")))
        return to_at_least_float32(self.judge(found * item))

    def _read(self, batch: SequenceBatch, name: str) -> tuple[Tensor, Tensor | None]:
        """The rows of a batch feature's items [n, width], as much as they count, and those of their
        features [n, places * width]."""
        own = f"{name}_own" in batch
        rows = self.item(batch.values(name)) if own else read_rows(self.item, batch.values(name))
        if own:
            rows = rows * batch.values(f"{name}_own").to(rows.dtype)[:, None]
        if self.item_features is None:
            return rows, None
        found = read_rows(self.item_features, batch.values(f"{name}_features"))
        return rows, found.flatten(1)

    def _embed(self, rows: Tensor, side: Tensor | None, action: Tensor | None) -> Tensor:
        """The tokens [n, width] of events or candidates."""
        x: Tensor = self.content(rows)
        if self.additional is not None:
            x = x + self.additional(side)
        return x if action is None else x + action

    def _embed_actions(
        self, batch: SequenceBatch, history: Jagged
    ) -> tuple[Tensor | None, Tensor | None]:
        """The vectors of the events' actions [events, width], and that of a candidate [1, width].
        They depend on the bits alone, so the network computes each combination once."""
        if not self.bits:
            return None, None
        codes = torch.arange(1 << self.bits, device=self.no_action.device)
        marks = (codes[:, None] >> torch.arange(self.bits, device=codes.device)) & 1
        inputs = (marks[..., None] * self.action_bits).flatten(1)
        vectors = self.action_network(torch.cat([inputs, self.no_action]))
        actions = find_sequence(batch, "actions", history).values & (len(codes) - 1)
        return read_vectors(vectors, actions), vectors[-1:]

    def _embed_requests(self, batch: SequenceBatch, candidates: Nested) -> Tensor | None:
        """The tokens of the requests' context [samples * places, width], if there is any. A sample
        without a candidate has those of empty rows, which nothing reads."""
        if self.context_features is None:
            return None
        codes = find_sequence(batch, "context_features", candidates.outer)
        rows = read_rows(self.context_features, codes.values)  # [candidates, places, width]
        counts = candidates.outer.host_lengths
        if not bool((counts == 1).all()):
            _require_shared(codes, candidates)
            first = compute_offsets(candidates.counts)[:-1]
            rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
            last = rows.shape[0] - 1
            rows = rows.index_select(0, torch.where(candidates.counts > 0, first, last))
        bias = self.context_bias[:, None]
        tokens = torch.baddbmm(bias, rows.transpose(0, 1), self.context_weight)
        return tokens.transpose(0, 1).reshape(-1, self.encoder.width)

    def _order(self, history: Jagged, candidates: Nested) -> tuple[Tensor, Tensor]:
        """The encoder's places of events, candidates and context [tokens], and of the candidates
        alone."""
        context, counts = self.encoder.context, candidates.counts
        lengths = history.lengths + counts + context
        starts = compute_offsets(lengths)[:-1]
        events = concat_ranges(starts + context, history.lengths, history.values.shape[0])
        after = starts + context + history.lengths
        places = concat_ranges(after, counts, candidates.lengths.numel())
        before = starts[:, None] + torch.arange(context, device=starts.device)
        return torch.cat([events, places, before.flatten()]), places


def _join(rows: Tensor, side: Tensor | None) -> Tensor:
    return rows if side is None else torch.cat([rows, side], dim=1)


def _require_single_items(candidates: Nested) -> None:
    lengths = candidates.inner.host_lengths
    if bool((lengths != 1).any()):
        number = int((lengths != 1).nonzero()[0])
        raise ValueError(
            f"a candidate of a DLRM is one item, but candidate {number} of the batch has "
            f"{int(lengths[number])}"
        )


def _require_shared(codes: Jagged, candidates: Nested) -> None:
    """Raises ValueError if candidates of a sample differ in their context."""
    values = (codes if codes.host is None else codes.host).values.cpu()
    counts = candidates.outer.host_lengths
    first = torch.repeat_interleave(compute_offsets(counts)[:-1], counts)
    differ = (values != values[first]).any(dim=1)
    if bool(differ.any()):
        sample = int(torch.repeat_interleave(torch.arange(len(counts)), counts)[differ][0])
        raise ValueError(
            f"the candidates of sample {sample} differ in their context, which a DLRM reads before "
            "the history: give one candidate a sample (--candidates 1)"
        )


EPS = 1e-5  # epsilon of all norms outside of the encoder's layers
HOUR, DAY = (3600, 24), (86400, 7)  # seconds of a unit, units of a cycle
CYCLES = (HOUR, DAY)

Draw = Callable[[Tensor], Tensor]


class RowNorm(nn.LayerNorm):
    """LayerNorm in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return norm_rows(x, self.weight, self.bias, self.eps)


class SwishNorm(nn.LayerNorm):
    """x * sigmoid(LayerNorm(x)), in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return swish_norm(x, self.weight, self.bias, self.eps)


def make_linear(inputs: int, outputs: int, draw: Draw) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    draw(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def make_network(sizes: tuple[int, int, int], draw: Draw, *, norm: bool = True) -> nn.Sequential:
    """Builds Linear, SwishNorm, Linear of (inputs, hidden, outputs), and a norm of the outputs."""
    inputs, hidden, outputs = sizes
    last = [RowNorm(outputs, eps=EPS)] if norm else []
    return nn.Sequential(
        make_linear(inputs, hidden, draw),
        SwishNorm(hidden, eps=EPS),
        make_linear(hidden, outputs, draw),
        *last,
    )


class Permute(torch.autograd.Function):
    """Rows x [n, ...] in the places `order` [n], a permutation: moved by reads in both directions,
    which are faster than writes to places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return x.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None


def find_phases(times: Tensor) -> Tensor:
    """Times [n] in seconds since 1970 -> cosine and sine of the hour of the day and of the day of
    the week [n, 4] float32, the cycle of weeks from a Thursday. The public model rounds times to
    float32 and pi to 3.14: phases are the same."""
    seconds = times.to(torch.float32)
    phases = []
    for unit, count in CYCLES:
        units = torch.div(seconds, unit, rounding_mode="floor")
        angle = torch.remainder(units, count) / count * 2 * 3.14
        phases += [angle.cos(), angle.sin()]
    return torch.stack(phases, dim=-1)
