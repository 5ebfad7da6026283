"""Pieces of an exchange that are under way together."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from freescale.embedding.groups.sharded import run_pipelined


@dataclass
class Sent:
    """A piece on its way."""

    number: int

    def wait(self):
        return torch.tensor(self.number)


@pytest.mark.parametrize("lines", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_something_is_done_once_while_the_first_are_on_their_way(count, lines):
    events = []
    run_pipelined(
        range(count),
        lambda piece: (events.append(f"start {piece}"), Sent(piece))[1],
        lambda piece, found: events.append(f"finish {piece}") if found == piece else None,
        lines,
        lambda: events.append("meanwhile"),
    )
    begun = min(count, lines + 1)
    assert events[: begun + 1] == [*(f"start {piece}" for piece in range(begun)), "meanwhile"]
    assert [event for event in events if "finish" in event] == [f"finish {n}" for n in range(count)]
    assert len(events) == 2 * count + 1
