"""A dense optimizer's state in a checkpoint: by parameter name, as it is. A save makes none, a load
makes what was saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from freescale.train.state.packing import Unpacker, pack

Packed = dict[str, Any]  # by parameter name


def pack_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], tensors: dict[str, Tensor]
) -> tuple[Packed, Packed]:
    """(state of each parameter, state that is no parameter's). `names` are the model's parameters',
    by identity."""
    _refuse_others(optimizer, names)
    own: Packed = {}
    shared: Packed = {}
    for key, entries in optimizer.state.items():
        if isinstance(key, str):
            shared[key] = pack(entries, f"optimizer-shared/{key}", tensors)
        elif id(key) in names:
            own[names[id(key)]] = pack(entries, f"optimizer/{names[id(key)]}", tensors)
        else:
            raise ValueError(
                f"the optimizer has state for a {type(key).__name__} that is no "
                "parameter of the model"
            )
    return own, shared


def _refuse_others(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    for parameter in _parameters(optimizer):
        if id(parameter) not in names:
            shape = tuple(parameter.shape)
            raise ValueError(
                f"the optimizer has a parameter of shape {shape} that is not the "
                "model's: give it dense_parameters()"
            )


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def refuse_before_it_steps(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """What it will keep from step to step and a checkpoint cannot hold, by name. torch's own have
    nothing of that kind; of another a copy makes a step. One that cannot be copied, or not step so,
    is heard of at the first save."""
    _refuse_others(optimizer, names)
    if optimizer.state or type(optimizer).__module__.startswith("torch.optim."):
        pack_optimizer(optimizer, names, {})
        return
    devices = {p.device for p in _parameters(optimizer) if p.device.type == "cuda"}
    with torch.random.fork_rng([*devices]):
        try:
            tried = copy.deepcopy(optimizer)
            for parameter in _parameters(tried):
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            tried.step()
        except Exception:
            return
    pairs = zip(_parameters(tried), _parameters(optimizer), strict=True)
    pack_optimizer(tried, {id(copied): names[id(parameter)] for copied, parameter in pairs}, {})


def unpack_optimizer(
    optimizer: Optimizer, names: Mapping[int, str], state: Mapping[str, Any], unpacker: Unpacker
) -> dict[Any, Any]:
    """What the optimizer's state will be, all of it, once the room is filled. `state`: the
    checkpoint's."""
    _refuse_others(optimizer, names)
    own = state.get("optimizer_state")
    if own is None:
        own = _tensors_only(unpacker.metadata)
    values: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (packed := own.get(names[id(parameter)])) is not None:
                values[parameter] = unpacker.unpack(
                    packed, parameter.device, bool(group.get("capturable") or group.get("fused"))
                )
    return values | {
        key: unpacker.unpack(packed) for key, packed in state.get("optimizer_shared", {}).items()
    }


def _tensors_only(metadata: Metadata) -> Packed:
    """Checkpoints of format 1: what is not a tensor was not saved."""
    own: dict[str, list[Any]] = {}
    for name in metadata.state_dict_metadata:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition("/")
            own.setdefault(parameter, []).append([key, {"tensor": name}])
    return {parameter: {"dict": entries} for parameter, entries in own.items()}
