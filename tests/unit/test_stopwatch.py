"""The stopwatch of a rank: which step it speaks of, and how long that computed."""

from __future__ import annotations

import torch

from freescale.ledger.ledger import Clock
from freescale.pipeline.stopwatch import Stopwatch


class Device(Clock):
    """A device that has reached `reached`; stamps count up."""

    def __init__(self):
        self.now, self.reached = 0, 0

    def stamp(self):
        self.now += 1
        return self.now

    def read(self, stamp):
        return stamp if stamp <= self.reached else None


def compute(watch, step):
    with watch.computing():
        pass
    watch.finish(step)


def test_the_last_step_and_the_one_before():
    clock = Device()
    watch = Stopwatch(clock, torch.device("cuda"))
    assert watch.last() == watch.last(before=True) == (0, 0)
    compute(watch, 1)
    assert watch.last() == (1, 0)  # the device is not there yet
    compute(watch, 2)
    clock.reached = 2
    assert watch.last() == (2, 0)
    assert watch.last(before=True) == (1, 1)
    clock.reached = 4
    assert watch.last() == (2, 1)
    compute(watch, 3)
    assert watch.last(before=True) == (2, 1)
