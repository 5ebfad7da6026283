"""When samples stay where they are, because moving them would not pay."""

from __future__ import annotations

import numpy as np

from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel

LENGTHS = np.array([9, 2, 3, 1, 1, 2])
TABLE = np.stack([LENGTHS, np.zeros(6, np.int64), LENGTHS], axis=1)
HOME = np.array([0, 0, 0, 1, 1, 1])  # 14 events and 4: the best assignment has 9 and 9
COST = CostModel(0.0, 10.0)


def test_samples_stay_where_the_best_assignment_gains_too_little():
    kept = Balancer("greedy", COST, least_gain=51).keep(TABLE, HOME, 2)
    assert kept is not None and kept.moved_tokens == 0
    assert (kept.rank_of == HOME).all()
    assert kept.loads.tolist() == kept.loads_before.tolist() == [140, 40]
    assert kept.bound == 90
    for least in (50, 0):
        assert Balancer("greedy", COST, least_gain=least).keep(TABLE, HOME, 2) is None


def test_samples_move_for_a_cap_and_for_what_is_measured():
    assert Balancer("greedy", COST, cap=14, least_gain=51).keep(TABLE, HOME, 2) is not None
    assert Balancer("greedy", COST, cap=13, least_gain=51).keep(TABLE, HOME, 2) is None
    assert Balancer("greedy", COST, adapt=True, least_gain=51).keep(TABLE, HOME, 2) is None


def test_nothing_to_move():
    assert Balancer("greedy", COST, least_gain=51).keep(TABLE[:0], HOME[:0], 2) is None
