"""Waits for events of a real GPU."""

from __future__ import annotations

import pytest
import torch

from freescale.streams import has_happened, record_event
from freescale.transport.event_waits import HAPPENED, find_query, load_poll, wait_for_event

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("cycles", [1_000, 50_000_000])  # within and beyond the moment of polling
def test_an_event_has_happened_when_the_wait_is_over(cycles):
    torch.cuda._sleep(cycles)
    event = record_event(blocking=True)
    wait_for_event(event)
    assert has_happened(event)


def test_the_driver_tells_what_has_happened_and_what_not():
    poll, query = load_poll(), find_query()
    assert poll is not None and query is not None
    torch.cuda._sleep(50_000_000)
    event = record_event()
    assert poll(query, event.cuda_event, 0.0) != HAPPENED
    event.synchronize()
    assert poll(query, event.cuda_event, 0.0) == HAPPENED
