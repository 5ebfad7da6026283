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
    """Groups of the other samples run between a send and its wait, forward and backward."""
    module, log = build_model("retrieval", table_device="cpu").double(), []
    whole = module.encoder.forward

    def forward(*inputs, **options):
        log.append("others forward")
        out = whole(*inputs, **options)
        out.register_hook(lambda _: log.append("others backward"))
        return out

    module.encoder.forward = forward
    differentiate(module, divide_here(make_batch(LENGTHS, "retrieval", 2), 3, log))
    times, layer = ["send keys", "wait"], ["send keys", "others forward", "wait"]
    back = ["send gradients", "others backward", "wait"]
    assert log == times + 2 * layer + 2 * back
