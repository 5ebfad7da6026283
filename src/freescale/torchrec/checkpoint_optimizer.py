"""The state of a dense optimizer in TorchRec's checkpoints: tensors, by the names of parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

States = dict[str, dict[str, Tensor]]  # by the name of a parameter and of a state


def list_states(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> States:
    """The optimizer's states of each parameter. ValueError if a parameter is not the model's, or a
    state is not a tensor."""
    states: States = {}
    for parameter in _list_parameters(optimizer):
        if parameter not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the "
                "model's: give it dense_parameters()"
            )
        kept = {
            name: value
            for name, value in optimizer.state.get(parameter, {}).items()
            if value is not None
        }
        for name, value in kept.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"the optimizer keeps {name!r} of {names[parameter]!r}, a "
                    f"{type(value).__name__}: checkpoints of TorchRec's have tensors"
                )
        states[names[parameter]] = kept
    return states


def make_room(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> States:
    """Allocates tensors like the optimizer's states after a step, which a copy of it makes."""
    tried = copy.deepcopy(optimizer)
    copies = _list_parameters(tried)
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    tried.step()
    pairs = zip(copies, _list_parameters(optimizer), strict=True)
    return list_states(tried, {copied: names[own] for copied, own in pairs if own in names})


def match_states(
    room: States, found: Mapping[str, Mapping[str, str]], kind: str
) -> dict[str, Tensor]:
    """The tensor of `room` for each key of a checkpoint. `found`: the keys by parameter and state;
    `kind`: the optimizer's name. ValueError if the states are another optimizer's."""
    wanted: dict[str, Tensor] = {}
    for parameter, states in room.items():
        there = found.get(parameter, {})
        for name in sorted({*states, *there}):
            if name not in there:
                raise ValueError(f"it has no {name!r} of {parameter!r}, which {kind} keeps")
            if name not in states:
                raise ValueError(
                    f"it has {there[name]!r}, a state which {kind} does not keep: give the "
                    "optimizer that it was trained with, or load weights alone"
                )
            wanted[there[name]] = states[name]
    return wanted


def restore(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], room: States
) -> None:
    """Makes the states in `room` the optimizer's."""
    for parameter in _list_parameters(optimizer):
        if room[names[parameter]]:
            optimizer.state[parameter] = room[names[parameter]]


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
