"""`ItemTower` against the sum that it is, row by row."""

from __future__ import annotations

import pytest
import torch

import freescale
from freescale import Jagged, SequenceBatch
from freescale.models import HSTU, FeatureTables, ItemTower, Retrieval
from freescale.transport.local import LocalTransport

ITEMS, ROWS, WIDTH = 9, 7, 4
VECTORS = torch.randn(ITEMS + 1, 3, generator=torch.Generator().manual_seed(5))
IDS = torch.tensor([3, 2, 2, 8, 3])  # item 2 twice, with different features: an unknown one
CODES = torch.tensor([[1, 4], [2, 5], [3, 0], [0, 0], [1, 6]])
OWN = torch.tensor([0.5, 0.0, 0.0, 1.0, 0.75])
COLUMNS = {"item": IDS, "item_features": CODES, "item_own": OWN, "item_vectors": IDS}


def build(features=ROWS, vectors=()):
    torch.manual_seed(0)
    return ItemTower(ITEMS, WIDTH, features, vectors).double()


@pytest.mark.parametrize("features", [0, ROWS])
@pytest.mark.parametrize("vectors", [(), (VECTORS,)])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_vector_is_own_row_and_features(features, vectors, sharded):
    tower, plain = build(features, vectors), build(features, vectors)
    expected = []
    for item, codes, own in zip(IDS, CODES, OWN, strict=True):
        row = plain.item.weight[item] * own
        for code in codes[codes > 0] if features else ():
            row = row + plain.item_features.weight[code]
        for table in vectors:
            row = row + plain.item_vectors[0].projection.weight @ table[item].double()
        expected.append(row)
    batch = SequenceBatch(dense=COLUMNS)
    if not sharded:
        found = tower(batch)
    else:
        ids = {"item": ["item"]} | ({"item_features": ["item_features"]} if features else {})
        model = freescale.parallelize(tower, ids, transport=LocalTransport())
        with model.reading(batch) as batch:
            found = model(batch)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-15)


def test_items_of_a_history():
    tower = build()
    lengths = torch.tensor([2, 0, 3])
    columns = {f"history{name[4:]}": Jagged(part, lengths) for name, part in COLUMNS.items()}
    found = tower(SequenceBatch(sequences=columns), "history")
    assert torch.equal(found, tower(SequenceBatch(dense=COLUMNS)))


def test_the_heads_have_tables_of_the_same_names():
    tower = build(vectors=(VECTORS,))
    tables = FeatureTables(ROWS, vectors=[VECTORS])
    encoder = HSTU(width=WIDTH, layers=1, heads=1, max_length=5)
    head = Retrieval(encoder, num_items=ITEMS, feature_tables=tables, normalize=False).double()
    head.load_state_dict(tower.state_dict(), strict=False)
    found = head.encode_items(tower.item.weight[IDS], CODES, OWN, IDS)
    torch.testing.assert_close(found, tower(SequenceBatch(dense=COLUMNS)), rtol=1e-12, atol=1e-15)
