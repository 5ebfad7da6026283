"""Features of items, events and users on a GPU: the losses of a CPU, and the same bits from every
schedule."""

from __future__ import annotations

import pytest
import torch
from helpers.feature_cases import SOME, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
@pytest.mark.parametrize("per", ["sample", "batch"])
def test_the_losses_of_a_cpu(kind, per):
    expected, _ = train("cpu", kind, per)
    found, _ = train("cuda", kind, per)
    assert found == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
@pytest.mark.parametrize("tables", SOME)
def test_every_schedule_makes_the_same_bits(kind, tables):
    serial, rows = train("cuda", kind, "batch", "serial", SOME[tables])
    for schedule in ("staged", "serial"):
        losses, found = train("cuda", kind, "batch", schedule, SOME[tables])
        assert losses == serial
        assert all(torch.equal(found[name], value) for name, value in rows.items())
