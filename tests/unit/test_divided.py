"""Divided histories in the model, with an exchange that stays on this rank: what is computed, and
in which order."""

from __future__ import annotations

import pytest
import torch
from helpers.divided_cases import build_model, differentiate, divide_here, make_batch

from freescale.visible import Visible

LENGTHS = [50, 6, 30, 9, 4, 7]


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
@pytest.mark.parametrize("count, visible", [(2, None), (5, None), (3, Visible(3, 8))])
def test_parts_compute_what_the_whole_does(task, count, visible):
    module = build_model(task, features=True, table_device="cpu", visible=visible).double()
    batch = make_batch(LENGTHS, task, 2, features=True)
    expected = differentiate(module, batch)
    found = differentiate(module, divide_here(batch, count))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=name)


def test_others_compute_while_keys_and_gradients_travel():
    """The other samples run through a layer between its send and its wait, forward and
    backward."""
    module, log = build_model("retrieval", table_device="cpu").double(), []
    run = module.encoder._run_layers

    def run_layers(*inputs, layers=None, **options):
        if layers is None:  # of parts
            return run(*inputs, **options)
        log.append(f"layer {layers.start} forward")
        out = run(*inputs, layers=layers, **options)
        out.register_hook(lambda _: log.append(f"layer {layers.start} backward"))
        return out

    module.encoder._run_layers = run_layers
    differentiate(module, divide_here(make_batch(LENGTHS, "retrieval", 2), 3, log))
    forward = [x for n in (0, 1) for x in ("send keys", f"layer {n} forward", "wait")]
    back = [x for n in (1, 0) for x in ("send gradients", f"layer {n} backward", "wait")]
    assert log == ["send keys", "wait"] + forward + back
