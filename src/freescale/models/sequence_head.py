"""What the heads share: the tables in front of the encoder, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from freescale.batch import HostSizes, Jagged, SequenceBatch
from freescale.config import ModelConfig
from freescale.models.columns import find_sequence, measure_time_span
from freescale.models.divided import encode_divided
from freescale.models.encoder import Encoder
from freescale.models.features import (
    FeatureTables,
    ItemVectors,
    VectorFeature,
    add_features,
    describe_items,
    embed_features,
    sum_features,
)


class SequenceHead(nn.Module):
    """Item and action tables in front of the encoder, and those of features; on the meta device
    they take no memory."""

    _item_features: tuple[str, ...]

    def __init__(
        self,
        encoder: Encoder,
        num_items: int,
        num_actions: int,
        feature_tables: FeatureTables,
        table_device: str | None,
    ) -> None:
        super().__init__()
        if num_items < 1 or num_actions < 0:
            raise ValueError(
                "num_items must be at least 1 and num_actions at least 0, not "
                f"{num_items} and {num_actions}"
            )

        def make_table(rows: int) -> Any:
            if not rows:
                return None
            # to draw on the meta device, torch would import its compiler, which takes seconds
            weight = None
            if table_device == "meta":
                weight = torch.empty(rows, encoder.width, device=table_device)
            return nn.Embedding(rows, encoder.width, device=table_device, _weight=weight)

        self.item = make_table(num_items)
        self.action = make_table(num_actions)
        self.encoder = encoder
        self.item_features = make_table(feature_tables.item)
        self.event_features = make_table(feature_tables.event)
        self.user_features = make_table(feature_tables.user)
        self.context_features = make_table(feature_tables.context)
        self.user_places = tuple(feature_tables.user_places)
        self.item_vectors = nn.ModuleList(
            VectorFeature(vectors, encoder.width) for vectors in feature_tables.vectors
        )
        for table in self.children():
            if isinstance(table, nn.Embedding) and table_device != "meta":
                nn.init.normal_(table.weight, std=ModelConfig.row_std or encoder.width**-0.5)

    @property
    def features(self) -> dict[str, list[str]]:
        """Which batch features each table reads."""
        found = {"item": list(self._item_features)}
        if self.action is not None:
            found["action"] = ["actions"]
        if self.item_features is not None:
            found["item_features"] = [f"{name}_features" for name in self._item_features]
        for name in ("event_features", "user_features", "context_features"):
            if getattr(self, name) is not None:
                found[name] = [name]
        return found

    def _describe_items(self, batch: SequenceBatch, names: Sequence[str]) -> ItemVectors | None:
        """The vectors of the items of some batch features; None if items have no features."""
        if self.item_features is None:
            return None
        return describe_items(self.item, self.item_features, batch, names, self.item_vectors)

    def describe_rows(
        self,
        rows: Tensor,
        codes: Tensor | None = None,
        own: Tensor | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Adds their features to rows [n, width] of the item table, each described by itself:
        `codes` [n, places], `own` [n] and `vectors` [n], as of `Retrieval.encode_items`."""
        if self.item_features is None:
            return rows
        assert codes is not None and own is not None, "the model has features of items"
        rows = add_features(rows, own, sum_features(self.item_features, codes))
        for feature in self.item_vectors:
            assert vectors is not None, "the model has vectors of items"
            rows = rows + feature(vectors).to(rows.dtype)
        return rows

    def _embed_events(
        self, batch: SequenceBatch, history: Jagged, items: ItemVectors | None
    ) -> Tensor:
        """Sums the rows of each event: of its item, action and features. [tokens, width]"""
        x: Tensor = self.item(history.values) if items is None else items.read("history")
        if self.event_features is not None:
            found = find_sequence(batch, "event_features", history)
            x = x + sum_features(self.event_features, found.values)
        if self.action is not None:
            x = x + self.action(find_sequence(batch, "actions", history).values)
        return x

    def _embed_users(self, batch: SequenceBatch) -> Tensor | None:
        """[samples, features, width]: a token for each feature of the users."""
        if self.user_features is None:
            return None
        codes = batch.values("user_features")
        return embed_features(self.user_features, codes, self.user_places)

    def _build_inputs(
        self, batch: SequenceBatch, items: ItemVectors | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, HostSizes]:
        """Encoder inputs of the histories: events, lengths, timestamps, host sizes."""
        history = find_sequence(batch, "history")
        if items is None:
            items = self._describe_items(batch, ["history"])
        x, timestamps, span = self._embed_events(batch, history, items), None, None
        if self.encoder.has_time_bias:
            times = find_sequence(batch, "timestamps", history)
            timestamps, span = times.values, measure_time_span(times)
        plans = None if history.host is None else history.host.plans
        sizes = HostSizes(history.host_lengths, time_span=span, plans=plans)
        return x, history.lengths, timestamps, sizes

    def _encode(
        self,
        batch: SequenceBatch,
        *inputs: Any,
        by: Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        users = self._embed_users(batch)
        if users is not None:
            options["prefix"] = users
        if batch.divided is not None:
            by = partial(encode_divided, self.encoder, batch.divided)
        outputs: Tensor = (by or self.encoder)(*inputs, **options)
        return outputs


def to_at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
