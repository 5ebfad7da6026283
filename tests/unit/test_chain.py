"""Which checkpoints may go: never one that another depends on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.train.state.disk import find_expired, find_needed


@st.composite
def folders(draw):
    """Steps, each a full checkpoint or a delta of any earlier one."""
    parents = {}
    for step in sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=10))):
        choices = [None, *parents]
        parents[step] = draw(st.sampled_from(choices))
    return parents


@settings(max_examples=100, deadline=None)
@given(folders(), st.integers(1, 4), st.sets(st.integers(1, 30), max_size=2))
def test_what_stays_has_all_that_it_depends_on(parents, keep, protected):
    saved = max(parents)
    expired = find_expired(parents, saved, keep, protected)
    stays = set(parents) - set(expired)
    assert {*sorted(parents)[-keep:], saved, *(protected & set(parents))} <= stays
    for step in stays:
        assert parents[step] is None or parents[step] in stays
    # and nothing stays without a reason
    asked = {*sorted(parents)[-keep:], *(protected & set(parents))}
    assert stays == find_needed(parents, asked)


def test_full_checkpoints_alone_are_kept_by_number():
    parents = dict.fromkeys((10, 20, 30, 40))
    assert find_expired(parents, 40, 2) == [10, 20]
    assert find_expired(parents, 40, 2, protected=[10]) == [20]


def test_a_chain_goes_as_a_whole_once_a_full_one_takes_its_place():
    parents = {10: None, 20: 10, 30: 20}
    assert find_expired(parents, 30, 1) == []
    parents[40] = None
    assert find_expired(parents, 40, 2) == []
    parents[50] = 40
    assert find_expired(parents, 50, 2) == [10, 20, 30]
