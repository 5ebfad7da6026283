"""What trains the dense part, as JSON and named tensors, so that nothing has to be pickled: nested
values and the optimizer's state.

{"step": 3, "sums": [tensor, tensor]}
->  {"dict": [["step", 3], ["sums", {"list": [{"tensor": "a/sums/0"}, ...]}]]}
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Packed = dict[str, Any]  # by parameter name
Names = Mapping[int, str]  # of the model's parameters, by identity


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns JSON, and adds tensors by names below `name`. ValueError for what is neither."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ValueError(
                f"{name} is a tensor of layout {value.layout}, which a checkpoint cannot hold"
            )
        if name in tensors:
            raise ValueError(f"two tensors of a checkpoint would have the name {name}")
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or (
        isinstance(value, (bool, int, float, str)) and not isinstance(value, Enum)
    ):
        return value
    if type(value) in (list, tuple):
        inner = [pack(each, f"{name}/{place}", tensors) for place, each in enumerate(value)]
        return {type(value).__name__: inner}
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        items = [[key, pack(each, f"{name}/{key}", tensors)] for key, each in value.items()]
        return {"dict": items}
    raise ValueError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it holds tensors, "
        "numbers, text, None, and lists, "
        "tuples and dicts of them"
    )


class Unpacker:
    """Rebuilds packed values with empty tensors, which it collects in `tensors`, to be read into.
    `saved`: tensors with the shapes and types of the saved ones, maybe without memory. `device`:
    where tensors go that were not on the host."""

    def __init__(
        self, state: Mapping[str, Any], saved: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.saved, self._device = saved, device
        self._on_host = set(state["on_host"]) if "on_host" in state else None

    def unpack(
        self, packed: Any, device: torch.device | None = None, never_on_host: bool = False
    ) -> Any:
        """The value that was packed, with tensors still to be filled: on `device`, or on the host
        if they were. A checkpoint from a CPU has no list of those: single numbers are on the host,
        where torch's optimizers keep them unless capturable or fused."""
        if not isinstance(packed, dict):
            return packed
        ((kind, inner),) = packed.items()
        if kind == "tensor":
            return self._allocate(inner, device or self._device, never_on_host)
        if kind == "dict":
            return {key: self.unpack(value, device, never_on_host) for key, value in inner}
        values = [self.unpack(value, device, never_on_host) for value in inner]
        return tuple(values) if kind == "tuple" else values

    def _allocate(self, name: str, device: torch.device, never_on_host: bool) -> Tensor:
        saved = self.saved.get(name)
        if saved is None:
            raise ValueError(f"the checkpoint has no tensor {name}, which its state.json names")
        host = name in self._on_host if self._on_host is not None else not saved.shape
        where = torch.device("cpu") if host and not never_on_host else device
        self.tensors[name] = torch.empty(saved.shape, dtype=saved.dtype, device=where)
        return self.tensors[name]


# ---- the optimizer's state, by parameter name. Saving creates none.


def pack_optimizer(
    optimizer: Optimizer, names: Names, tensors: dict[str, Tensor]
) -> tuple[Packed, Packed]:
    """(state of each parameter, state that belongs to no parameter)."""
    _refuse_other_parameters(optimizer, names)
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


def _refuse_other_parameters(optimizer: Optimizer, names: Names) -> None:
    for parameter in _list_parameters(optimizer):
        if id(parameter) not in names:
            shape = tuple(parameter.shape)
            raise ValueError(
                f"the optimizer has a parameter of shape {shape} that is not the "
                "model's: give it dense_parameters()"
            )


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def refuse_before_it_steps(optimizer: Optimizer, names: Names) -> None:
    """Refuses what the optimizer will keep from step to step and a checkpoint cannot hold. torch's
    own keep nothing like it; a copy of others makes a step, or they are refused at the first
    save."""
    _refuse_other_parameters(optimizer, names)
    if optimizer.state or type(optimizer).__module__.startswith("torch.optim."):
        pack_optimizer(optimizer, names, {})
        return
    devices = {p.device for p in _list_parameters(optimizer) if p.device.type == "cuda"}
    with torch.random.fork_rng([*devices]):
        try:
            tried = copy.deepcopy(optimizer)
            for parameter in _list_parameters(tried):
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            tried.step()
        except Exception:
            return
    pairs = zip(_list_parameters(tried), _list_parameters(optimizer), strict=True)
    pack_optimizer(tried, {id(copied): names[id(parameter)] for copied, parameter in pairs}, {})


def unpack_optimizer(
    optimizer: Optimizer, names: Names, state: Mapping[str, Any], unpacker: Unpacker
) -> dict[Any, Any]:
    """The optimizer's whole state, with tensors still to be filled. `state`: the saved JSON."""
    _refuse_other_parameters(optimizer, names)
    own = state.get("optimizer_state")
    if own is None:
        own = _name_format_1(unpacker.saved)
    values: dict[Any, Any] = {}
    for group in optimizer.param_groups:
        never_on_host = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            if (packed := own.get(names[id(parameter)])) is not None:
                values[parameter] = unpacker.unpack(packed, parameter.device, never_on_host)
    shared = state.get("optimizer_shared", {})
    return values | {key: unpacker.unpack(packed) for key, packed in shared.items()}


def _name_format_1(saved: Iterable[str]) -> Packed:
    """Checkpoints of format 1 hold only the tensors of an optimizer's state."""
    own: dict[str, list[Any]] = {}
    for name in saved:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition("/")
            own.setdefault(parameter, []).append([key, {"tensor": name}])
    return {parameter: {"dict": entries} for parameter, entries in own.items()}
