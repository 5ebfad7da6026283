"""The public DlrmHSTU (meta-recsys/generative-recommenders) with the features of dlrm_v4_hstu, its
batches, and which of its parameters are whose here. Needs TorchRec and fbgemm, or what
`stand_ins` has in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from freescale.batch import SequenceBatch, compute_offsets
from freescale_bench.common.public import open_public
from freescale_bench.dlrm.shapes import TASK, Shape

_ITEM = ("item", "artist", "album")
_OFFERED = tuple(f"offered_{name}" for name in _ITEM)


class Inputs(NamedTuple):
    history: KeyedJaggedTensor
    candidates: KeyedJaggedTensor


def build_public(
    shape: Shape, folder: Path, *, device: str = "cpu", bf16: bool = False, tables: bool = True
) -> nn.Module:
    """Builds the model without dropout, in plain torch on a CPU and with its Triton kernels on a
    GPU. `folder` contains generative_recommenders. Without `tables`, rows are inputs."""
    open_public(folder)
    from generative_recommenders.common import HammerKernel
    from generative_recommenders.modules.dlrm_hstu import DlrmHSTU, DlrmHSTUConfig
    from generative_recommenders.modules.multitask_module import MultitaskTaskType, TaskConfig

    context = _name_context(shape)
    merged = zip((*_ITEM, "time", "action", "watched"), (*_OFFERED, "now", "labels", "watch"))
    config = DlrmHSTUConfig(
        max_seq_len=shape.tokens,
        max_num_candidates=1,
        hstu_num_heads=shape.heads,
        hstu_attn_linear_dim=shape.width // shape.heads,
        hstu_attn_qk_dim=shape.width // shape.heads,
        hstu_attn_num_layers=shape.layers,
        hstu_embedding_table_dim=shape.width,
        hstu_transducer_embedding_dim=shape.width,
        hstu_preprocessor_hidden_dim=shape.hidden,
        hstu_input_dropout_ratio=0.0,
        hstu_linear_dropout_rate=0.0,
        contextual_feature_to_max_length={name: 1 for name in context},
        candidates_weight_feature_name="labels",
        candidates_watchtime_feature_name="watch",
        candidates_querytime_feature_name="now",
        causal_multitask_weights=0.2,
        multitask_configs=[TaskConfig(TASK, 1, MultitaskTaskType.BINARY_CLASSIFICATION)],
        user_embedding_feature_names=[*_ITEM, *context],
        item_embedding_feature_names=list(_OFFERED),
        uih_post_id_feature_name="item",
        uih_action_time_feature_name="time",
        uih_weight_feature_name="action",
        merge_uih_candidate_feature_mapping=list(merged),
        action_weights=[1, 2, 4],
    )
    configs = {
        names[0]: EmbeddingConfig(
            name=names[0], num_embeddings=rows, embedding_dim=shape.width, feature_names=names
        )
        for names, rows in (list_tables(shape) if tables else ())
    }
    torch.manual_seed(0)
    kind = {"is_inference": False, "bf16_training": bf16, "is_dense": not tables}
    model = DlrmHSTU(config, configs, **kind)
    model.set_hammer_kernel(HammerKernel.TRITON if device == "cuda" else HammerKernel.PYTORCH)
    if bf16:
        model.set_training_dtype(torch.bfloat16)
    if tables:
        for weight in model._embedding_collection.to_empty(device=device).parameters():
            nn.init.normal_(weight, std=0.02)
    found: nn.Module = model.to(device)
    return found


def list_tables(shape: Shape) -> Iterator[tuple[list[str], int]]:
    """The features that read each table, and its rows."""
    features = [[name, offered] for name, offered in zip(_ITEM, _OFFERED)]
    features += [[name] for name in _name_context(shape)]
    return zip(features, (*shape.rows, *shape.context), strict=True)


def convert_batch(shape: Shape, batch: SequenceBatch) -> Inputs:
    """The same samples as the public model reads them."""
    history, candidates = (
        KeyedJaggedTensor(
            list(part),
            torch.cat([values for values, _ in part.values()]),
            lengths=torch.cat([lengths for _, lengths in part.values()]),
        )
        for part in split_batch(shape, batch)
    )
    return Inputs(history, candidates)


def name_inputs(shape: Shape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The features of `split_batch` that are ids of rows, and the others."""
    rows = (*_ITEM, *_OFFERED, *_name_context(shape))
    return rows, ("time", "action", "watched", "now", "labels", "watch")


def run_public(
    model: nn.Module, shape: Shape, batch: SequenceBatch, read: Callable[[str, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Runs a model without tables. `read` gets a feature and ids [n], and returns their rows.
    Returns the loss, and a probability for each sample."""
    from generative_recommenders.modules.dlrm_hstu import SequenceEmbedding

    history, offered = split_batch(shape, batch)
    longest = int(batch.sequences["history"].host_lengths.max())
    lengths, ones = history["item"][1], offered["offered_item"][1]
    read_names, given_names = name_inputs(shape)
    both = {**history, **offered}
    rows = {
        name: SequenceEmbedding(both[name][1], read(name, both[name][0])) for name in read_names
    }
    payload = {name: both[name][0] for name in given_names}
    payload["uih_offsets"] = compute_offsets(lengths)
    payload["candidate_offsets"] = compute_offsets(ones)
    outputs = model.main_forward(rows, payload, longest, lengths, 1, ones)  # type: ignore[operator]
    return outputs[2][TASK], outputs[3][0]


Columns = dict[str, tuple[Tensor, Tensor]]  # values and lengths by feature


def split_batch(shape: Shape, batch: SequenceBatch) -> tuple[Columns, Columns]:
    """The features of histories and context, and those of candidates."""
    sequences, device = batch.sequences, batch.device
    history, ones = sequences["history"], batch.candidates["candidates"].counts
    firsts = list(accumulate(shape.rows[1:-1], initial=0))
    watched = torch.zeros_like(history.values)
    of_events = {
        "item": history.values,
        **_split(sequences["history_features"].values, _ITEM[1:], firsts),
        "time": sequences["timestamps"].values,
        "action": sequences["actions"].values,
        "watched": watched,
    }
    context = _split(
        sequences["context_features"].values,
        _name_context(shape),
        list(accumulate(shape.context[:-1], initial=0)),
    )
    offered = {
        "offered_item": batch.values("candidates"),
        **_split(batch.values("candidates_features"), _OFFERED[1:], firsts),
        "now": sequences["candidate_timestamps"].values,
        "labels": sequences["labels"].values[:, 0].long(),
        "watch": torch.zeros_like(ones, device=device),
    }
    past = {name: (values, history.lengths) for name, values in of_events.items()}
    past |= {name: (values, ones) for name, values in context.items()}
    # the first feature of a candidate says how many there are
    return past, {name: (values, ones) for name, values in offered.items()}


def pair_parameters(model: nn.Module, public: nn.Module, shape: Shape) -> Iterator[tuple[str, Any]]:
    """(name here, where the same values are in a public tensor by name): a function from the public
    model's values by name to a tensor of the parameter's shape."""
    tables = "_embedding_collection.embeddings.{}.weight"

    def join(names: tuple[str, ...]) -> Any:
        return lambda get: torch.cat([get(tables.format(name)) for name in names])

    yield "item.weight", join(_ITEM[:1])
    yield "item_features.weight", join(_ITEM[1:])
    yield "context_features.weight", join(_name_context(shape))
    rows = model.get_parameter("encoder.time").shape[0]
    yield (
        "encoder.time",
        lambda get: get(f"{_TRANSDUCER}._positional_encoder._timestamp_embeddings_weight")[:rows],
    )
    for name, _ in model.named_parameters():
        if name.split(".")[0] in ("item", "item_features", "context_features"):
            continue
        if name == "encoder.time":
            continue
        other, turned = _translate(name)
        public.get_parameter(other)  # raises if there is none
        yield name, (lambda get, n=other, t=turned: get(n).T if t else get(n))


_TRANSDUCER = "_hstu_transducer"
_BEFORE = f"{_TRANSDUCER}._input_preprocessor"
_PREFIXES = {
    "content": f"{_BEFORE}._content_embedding_mlp",
    "additional": f"{_BEFORE}._additional_embedding_mlp",
    "action_network": f"{_BEFORE}._action_embedding_mlp",
    "action_bits": f"{_BEFORE}._action_encoder._action_embedding_table",
    "no_action": f"{_BEFORE}._action_encoder._target_action_embedding_table",
    "context_weight": f"{_BEFORE}._batched_contextual_linear_weights",
    "context_bias": f"{_BEFORE}._batched_contextual_linear_bias",
    "encoder.position": f"{_TRANSDUCER}._positional_encoder._position_embeddings_weight",
    "time_network.0": f"{_TRANSDUCER}._output_postprocessor._time_feature_combiner",
    "time_network.1": f"{_TRANSDUCER}._output_postprocessor._layer_norm",
    "candidate_network": "_item_embedding_mlp",
    "judge": "_multitask_module._prediction_module",
}
_LAYER = {  # of each layer, and whether it is transposed
    "input_norm.weight": ("_input_norm_weight", False),
    "input_norm.bias": ("_input_norm_bias", False),
    "projection.weight": ("_uvqk_weight", True),
    "projection.bias": ("_uvqk_beta", False),
    "attention_norm.weight": ("_output_norm_weight", False),
    "attention_norm.bias": ("_output_norm_bias", False),
    "output.weight": ("_output_weight", True),
}


def _translate(name: str) -> tuple[str, bool]:
    """The name of the same parameter in the public model, and whether it is transposed there."""
    if name.startswith("encoder.layers."):
        _, _, number, own = name.split(".", 3)
        other, turned = _LAYER[own]
        return f"{_TRANSDUCER}._stu_module._stu_layers.{number}.{other}", turned
    prefix = max((p for p in _PREFIXES if name == p or name.startswith(f"{p}.")), key=len)
    return _PREFIXES[prefix] + name.removeprefix(prefix), False


def _name_context(shape: Shape) -> tuple[str, ...]:
    return tuple(f"context_{number}" for number in range(len(shape.context)))


def _split(codes: Tensor, names: tuple[str, ...], firsts: list[int]) -> dict[str, Tensor]:
    """codes [n, places] of one table -> ids [n] of each place's own table."""
    columns = codes.unbind(1)
    return {n: column - first for n, column, first in zip(names, columns, firsts, strict=True)}
