"""What a single rank reads of its table: ids that were not announced are found in the copy."""

from types import SimpleNamespace

import torch

from freescale.embedding.groups.local import InPlaceRows


def read_in(table, ids, rows, slots=None):
    """Rows of ids of table 0, which are the numbers of their rows."""
    storage = SimpleNamespace(weight=table)
    return InPlaceRows([(0, ids)], rows, storage, lambda _, ids: ids, slots)


def test_other_ids_are_found_in_the_copy_of_a_large_batch():
    """As many as the first batch's check looks up: a comparison of each with each would take more
    memory than any machine has."""
    random = torch.Generator().manual_seed(0)
    table = torch.randn(3000, 4, generator=random)
    ids = torch.randint(0, 3000, (400_000,), generator=random)
    request = read_in(table, ids, ids.int())
    for part in (ids[:200_000], ids[200_000:].view(1000, 200)):
        rows, index = request.offer(None, part)
        assert torch.equal(rows[index], table[part])
    rows, index = request.offer(0, ids)
    assert torch.equal(rows[index], table[ids])
    _, other = request.offer(None, ids[:5])
    assert torch.equal(other, index[:5])  # one tensor of rows, one place for each row
    assert len(rows) <= 3001  # no larger than the table, whatever the batch


def test_without_rows_there_is_nothing_to_find():
    none = torch.zeros(0, dtype=torch.int64)
    request = read_in(torch.zeros(3, 2), none, none.int())
    rows, index = request.offer(None, none)
    assert rows.shape == (0, 2)
    assert index.shape == (0,)


def test_rows_are_found_by_their_slots():
    """Where rows are at home elsewhere, the table that is read is a cache: row 10 + s in slot s."""
    cache = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([13, 10, 15, 13])
    request = read_in(cache, rows, rows.int(), (rows - 10).int())
    slots, found = request.find(torch.tensor([[15, 11], [10, 99]]))
    assert found.tolist() == [[True, False], [True, False]]
    assert slots[found].tolist() == [5, 0]
    copied, index = request.offer(None, slots[found])
    assert torch.equal(copied[index], cache[[5, 0]])
    nothing = read_in(cache, rows[:0], rows[:0], rows[:0])
    assert nothing.find(rows)[1].tolist() == [False] * 4
