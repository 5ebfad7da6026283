"""The unmodified DlrmHSTU of meta-recsys/generative-recommenders, and its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from freescale_bench.common.public import open_public

_CONTEXT = ("user_id", "sex", "age_group", "occupation", "zip_code")
_HISTORY = ("movie_id", "movie_rating", "action_timestamp", "item_weights", "dummy_watch_time")
_CANDIDATE = (
    "item_movie_id",
    "item_movie_rating",
    "item_query_time",
    "item_action_weights",
    "item_dummy_watchtime",
)
_ROWS = {name: rows for name, rows in zip(_CONTEXT, (90, 2, 7, 21, 60), strict=True)}
_ROWS["movie_id"] = 200
_WIDTH = 32
_ACTIONS = [1, 2, 4, 8, 16]


class Samples(NamedTuple):
    """Histories and candidates of a batch of users."""

    history: KeyedJaggedTensor
    candidates: KeyedJaggedTensor


class SummedTasks(nn.Module):
    """The model as in its own training loop: the loss is the sum over tasks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Samples) -> tuple[Tensor, Any]:
        _, _, losses, predictions, *_ = self.model(batch.history, batch.candidates)
        return sum(losses.values()), predictions


def build_dlrm_hstu(folder: Path) -> nn.Module:
    """Builds a small DlrmHSTU in float32 without dropout, with the features and tasks of its
    configuration for MovieLens-1M."""
    open_public(folder)
    from generative_recommenders.common import HammerKernel
    from generative_recommenders.dlrm_v3.configs import get_hstu_configs
    from generative_recommenders.modules.dlrm_hstu import DlrmHSTU

    config = get_hstu_configs("movielens-1m")
    config.max_seq_len = 128
    config.hstu_num_heads, config.hstu_attn_num_layers = 2, 2
    config.hstu_attn_linear_dim = config.hstu_attn_qk_dim = 16
    config.hstu_embedding_table_dim = config.hstu_transducer_embedding_dim = _WIDTH
    config.hstu_preprocessor_hidden_dim = 32
    config.hstu_input_dropout_ratio = config.hstu_linear_dropout_rate = 0.0
    tables = {
        name: EmbeddingConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=_WIDTH,
            feature_names=[name, "item_movie_id"] if name == "movie_id" else [name],
        )
        for name, rows in _ROWS.items()
    }
    torch.manual_seed(0)
    model = DlrmHSTU(config, tables, is_inference=False, bf16_training=False)
    model.set_hammer_kernel(HammerKernel.PYTORCH)
    collection = model._embedding_collection.to_empty(device="cpu")
    for weight in collection.parameters():
        nn.init.normal_(weight, std=0.1)
    return SummedTasks(model)


def make_samples(seed: int, samples: int) -> Samples:
    """Makes histories of 20 to 60 movies and 3 to 10 candidates per user, with ids from a power
    law."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    def rank_ids(count: int, rows: int) -> Tensor:
        places = torch.rand(count, generator=generator) ** 3 * rows
        return places.long()

    def values(name: str, count: int) -> Tensor:
        if name in ("movie_id", "item_movie_id"):
            return rank_ids(count, _ROWS["movie_id"])
        if name in _CONTEXT:
            return rank_ids(count, _ROWS[name])
        if name in ("action_timestamp", "item_query_time"):
            return 1_000_000_000 + draw(0, 10_000_000, count).sort().values
        if name in ("item_weights", "item_action_weights"):
            return torch.tensor(_ACTIONS)[draw(0, len(_ACTIONS), count)]
        return draw(0, 6, count)

    def keyed(lengths: dict[str, Tensor]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            list(lengths),
            torch.cat([values(name, int(each.sum())) for name, each in lengths.items()]),
            lengths=torch.cat(list(lengths.values())),
        )

    one, history, candidates = (
        torch.ones(samples).long(),
        draw(20, 61, samples),
        draw(3, 11, samples),
    )
    return Samples(
        keyed({name: one for name in _CONTEXT} | {name: history for name in _HISTORY}),
        keyed({name: candidates for name in _CANDIDATE}),
    )
