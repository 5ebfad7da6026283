"""Marks of changed rows: each consumer finds what was marked since it last took its own."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.embedding import changed_rows as marks
from freescale.embedding.changed_rows import ChangedRows
from freescale.embedding.layout import TableSpec
from freescale.embedding.optimizers import Adam
from freescale.embedding.storage.api import TableRange
from freescale.embedding.storage.device import DeviceStorage
from freescale.kernels import native as bindings
from freescale.kernels.row_sums.reference import SortedRows

SIZE = 12
CONSUMERS = ("checkpoints", "snapshots")
ROWS = st.lists(st.integers(-1, SIZE - 1), max_size=8)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("mark"), ROWS),
        st.tuples(st.just("follow"), st.sampled_from(CONSUMERS)),
        st.tuples(st.just("forget"), st.sampled_from(CONSUMERS)),
        st.tuples(st.just("mark_all"), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(ACTIONS, st.integers(0, SIZE), st.integers(0, SIZE))
def test_marks_are_sets_of_rows_one_for_each_consumer(actions, first, last):
    changed, expected = ChangedRows(SIZE, torch.device("cpu")), {}
    for action, value in actions:
        if action == "mark":
            changed.mark(torch.tensor(value, dtype=torch.int32))
            for rows in expected.values():
                rows |= set(value) - {-1}
        elif action == "mark_all":
            changed.mark_all()
            for rows in expected.values():
                rows |= set(range(SIZE))
        elif action == "follow":
            changed.follow(value)
            expected[value] = set()
        else:
            changed.forget(value)
            expected.pop(value, None)
    for consumer in CONSUMERS:
        assert changed.is_followed(consumer) == (consumer in expected)
    for consumer, rows in expected.items():
        found = changed.find(consumer, slice(first, last)).tolist()
        assert found == sorted(row - first for row in rows if first <= row < last)


def test_every_update_marks_its_rows():
    spec = TableSpec("item", SIZE, 4, torch.float32, ("history",))
    storage = DeviceStorage([TableRange(spec, 0, 0, SIZE)], SIZE, Adam(), torch.device("cpu"))
    storage.changed.follow("checkpoints")
    options = {"step": 1, "factor": 1.0, "clip": None}
    storage.update(torch.tensor([3, 7]), torch.ones(2, 4), **options)
    readings = SortedRows.of(torch.tensor([9, 1, 9]))
    storage.update_readings(readings, torch.ones(3, 4), **options)
    assert storage.changed.find("checkpoints", slice(0, SIZE)).tolist() == [1, 3, 7, 9]
    touched = storage.weight.abs().sum(1).nonzero().view(-1)
    assert touched.tolist() == [1, 3, 7, 9]


@contextmanager
def in_plain_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marks, "load_native", lambda: None)
        yield


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4099])
def test_marks_in_c_are_those_of_torch(size):
    assert bindings.load_native() is not None, bindings.explain_missing_native()
    maker = torch.Generator().manual_seed(size)
    rows = torch.randint(-1, max(size, 1), (size // 3,), generator=maker)
    mine = torch.randint(0, 128, (size + 1,), dtype=torch.uint8, generator=maker)
    theirs = mine.clone()
    marks.mark_rows(mine, rows)
    with in_plain_torch():
        marks.mark_rows(theirs, rows)
    assert torch.equal(mine, theirs)
    for bit in (1, 16, 128):
        found = marks.find_marks(mine[:size], bit)
        with in_plain_torch():
            assert torch.equal(found, marks.find_marks(theirs[:size], bit))
        assert torch.equal(found, torch.tensor([r for r in range(size) if mine[r] & bit]).long())
    everything = torch.full((size,), 255, dtype=torch.uint8)
    assert torch.equal(marks.find_marks(everything, 2), torch.arange(size))


def test_a_ninth_consumer_is_refused_by_name():
    changed = ChangedRows(SIZE, torch.device("cpu"))
    for number in range(8):
        changed.follow(f"consumer {number}")
    with pytest.raises(ValueError, match=r"8 consumers at most.*consumer 8 cannot"):
        changed.follow("consumer 8")
    changed.forget("consumer 3")
    changed.mark(torch.tensor([1]))
    changed.follow("consumer 8")  # the bit of another, with what was marked for it
    assert not len(changed.find("consumer 8", slice(0, SIZE)))
    assert changed.find("consumer 4", slice(0, SIZE)).tolist() == [1]


def test_marks_come_back_as_they_were():
    changed = ChangedRows(SIZE, torch.device("cpu"))
    for consumer in CONSUMERS:
        changed.follow(consumer)
    changed.mark(torch.tensor([2, 5, -1]))
    kept = changed.get_marks("checkpoints")
    changed.follow("checkpoints")
    changed.mark(torch.tensor([7]))
    changed.set_marks("checkpoints", kept)
    assert changed.find("checkpoints", slice(0, SIZE)).tolist() == [2, 5]
    assert changed.find("snapshots", slice(0, SIZE)).tolist() == [2, 5, 7]
