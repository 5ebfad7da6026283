"""AdamW in C, beside torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from freescale.pipeline.dense import local

SHAPES = [(17, 16), (64,), (3,)]  # of the last, all is left over from whole vectors


def _train(optimizer_class, steps, weight_decay, generator):
    generator.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    options = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": weight_decay}
    optimizer = optimizer_class(parameters, **options)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameters, optimizer


@pytest.fixture
def natively(monkeypatch):
    """Counts the steps in C."""
    ran = []
    call = local.adam_tensors
    monkeypatch.setattr(local, "adam_tensors", lambda *a, **o: ran.append(1) or call(*a, **o))
    return ran


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch(weight_decay, natively):
    generator = torch.Generator()
    found = []
    for made in (local.AdamW, torch.optim.AdamW):
        parameters, optimizer = _train(made, 20, weight_decay, generator)
        states = [optimizer.state[parameter] for parameter in parameters]
        found.append([*parameters, *(state[name] for state in states for name in state)])
    assert len(natively) == 19  # the first makes the state
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)
    before, _ = _train(local.AdamW, 19, weight_decay, generator)
    assert not any(map(torch.equal, before, found[0]))


def test_it_goes_on_with_the_state_of_torch_s(natively):
    generator = torch.Generator()
    parameters, optimizer = _train(torch.optim.AdamW, 5, 0.0, generator)
    other = local.AdamW([nn.Parameter(each.detach().clone()) for each in parameters], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own in (optimizer, other):
        for parameter in own.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        own.step()
    for mine, plain in zip(other.param_groups[0]["params"], parameters, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)
        assert other.state[mine]["step"] == 6


def test_what_c_does_not_take_is_torch_s(natively):
    generator = torch.Generator()
    parameters, optimizer = _train(local.AdamW, 2, 0.0, generator)
    assert len(natively) == 1
    optimizer.state[parameters[0]]["step"] += 1  # steps of different numbers
    before = [each.detach().clone() for each in parameters]
    optimizer.step()
    assert [int(optimizer.state[each]["step"]) for each in parameters] == [4, 3, 3]
    assert not any(map(torch.equal, before, parameters))
    parameters[1].grad = None
    optimizer.step()
    assert [int(optimizer.state[each]["step"]) for each in parameters] == [5, 3, 4]


def test_parameters_without_a_gradient_are_left_alone(natively):
    parameters, optimizer = _train(local.AdamW, 2, 0.5, torch.Generator())
    before = [each.detach().clone() for each in parameters]
    parameters[1].grad = None
    count = len(natively)
    optimizer.step()
    assert len(natively) == count + 1
    assert list(map(torch.equal, before, parameters)) == [False, True, False]
    for parameter in parameters:
        parameter.grad = None
    optimizer.step()
    assert [int(optimizer.state[each]["step"]) for each in parameters] == [3, 2, 3]


def test_autograd_notices_a_step(natively):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = local.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(4)
    optimizer.step()
    out = (parameter * parameter).sum()
    optimizer.step()
    assert natively
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
