"""Item ids of any kind, for dynamic tables: numbers stay, other text is hashed, texts that
share an id are found, and negatives come from the batch alone."""

from __future__ import annotations

import csv as text_tables
import json
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from helpers.loading import load_histories
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from freescale.batch import Jagged, SequenceBatch
from freescale.cli.main import main
from freescale.data.histories import HistoriesFile
from freescale.data.ingest import hashed_ids
from freescale.data.ingest.hashed_ids import HashedIds, hash_ids
from freescale.data.ingest.prepare import prepare
from freescale.train.evaluate_retrieval import _list_seen, _pad

LEAST, MOST = -(1 << 63), (1 << 63) - 1


def expect_id(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is not None and str(number) == text and LEAST <= number <= MOST:
        return number
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def test_numbers_stay_and_other_text_is_hashed():
    texts = ["7", "-7", "007", "+7", " 7", "-0", "0", "1_0", "\u0663", "0x1f", "a", "", "1e3"]
    texts += [str(LEAST), str(MOST), str(MOST + 1), str(LEAST - 1)]
    assert hash_ids(texts).tolist() == [expect_id(text) for text in texts]
    assert hash_ids(["a"]).item() == 3405396810240292928  # of every version
    found = HashedIds()
    for block in (texts, texts[:2], ["5"]):
        assert found.encode(pa.array(block)).to_pylist() == [expect_id(text) for text in block]
    numbers = pa.array([3, LEAST, MOST, -1])
    assert found.encode(numbers).equals(numbers)


@given(blocks=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=30), max_size=12))
@settings(max_examples=30, deadline=None)
def test_texts_that_share_an_id_are_found(blocks):
    """By a hash of few values. Numbers may share one with a text, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashed_ids, "_hash_text", lambda text: _few(text).to_bytes(8, "little"))
        found, seen = HashedIds(), {}
        for block in blocks:
            texts = [f"x{n}" if n % 3 else str(n) for n in block]
            assert found.encode(pa.array(texts)).to_pylist() == [_few(text) for text in texts]
            seen |= {text: _few(text) for text in texts}
    assert found.different == len(seen)
    assert len(found._shared) == len(seen) - len(set(seen.values()))
    kept = {text: id for pair in found.texts for id, text in zip(*map(pa.Array.to_pylist, pair))}
    assert kept == {text: id for text, id in seen.items() if text.startswith("x")}


def _few(text: str) -> int:
    return int(text) if text.isdigit() else crc32(text.encode()) % 23


EVENTS = [
    *[("u1", item, time) for time, item in enumerate(["-5", "sku-1", "7", "sku-1", "007"])],
    *[("u2", item, time) for time, item in enumerate(["7", str(MOST), "-1", "sku-2"])],
    *[("u3", item, time) for time, item in enumerate(["sku-2", "-1"])],  # nothing to train on
    *[("u4", item, time) for time, item in enumerate(["-1", "sku-1", "8", "sku-3", "-5"])],
]


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "y.csv"
    lines = [f"{user},{item},{time}" for user, item, time in EVENTS]
    path.write_text("\n".join(["user,item,time", *lines, ""]))
    return path


def test_prepared_files_keep_hashed_ids_and_the_vocabulary_if_wanted(csv, tmp_path):
    made = prepare(csv, tmp_path / "cache", any_ids=True)
    names = sorted({user for user, *_ in EVENTS})
    rows = sorted(pq.read_table(made).to_pylist(), key=lambda row: row["user_id"])
    assert [row["item_id"] for row in rows] == [
        [expect_id(item) for user, item, _ in EVENTS if user == name] for name in names
    ]
    vocabulary = pq.read_table(made.parent / "vocabulary.parquet").to_pylist()
    texts = {"sku-1", "sku-2", "sku-3", "007"}
    assert {row["text"]: row["id"] for row in vocabulary if row["column"] == "item_id"} == {
        text: expect_id(text) for text in texts
    }
    file = HistoriesFile(made, any_ids=True)
    assert file.num_items == 9
    assert "9 ids, 4 of them strings hashed to 64 bits; no two share an id" in file.read_as[0]
    with pytest.raises(ValueError, match="--rows item=dynamic:ROWS"):
        HistoriesFile(made)
    bare = prepare(csv, tmp_path / "cache", any_ids=True, vocabulary=False)
    kept = pq.read_table(bare.parent / "vocabulary.parquet").column("column").to_pylist()
    assert set(kept) == {"user_id"}
    assert HistoriesFile(bare, any_ids=True).fingerprint == file.fingerprint
    static = prepare(csv, tmp_path / "cache")
    assert HistoriesFile(static).fingerprint != file.fingerprint


@pytest.mark.parametrize("per", ["sample", "position", "batch"])
def test_negatives_are_targets_of_the_batch_on_every_number_of_ranks(csv, tmp_path, per):
    path = prepare(csv, tmp_path / "cache", any_ids=True)
    options = {"any_ids": True, "in_batch_share": 1.0, "count": 40, "per": per}
    options |= {"halo": 2, "shuffle": False, "epochs": 2}
    whole = load_histories(path, 4, **options)
    assert whole.negatives.log_q and whole.negatives.source == "uniform"
    for number in range(2):
        one = whole.batch(number)
        parts = [
            load_histories(path, 4, rank=r, world=3, **options).batch(number) for r in range(3)
        ]
        joined = SequenceBatch.concat(parts)
        assert all(torch.equal(a, b) for a, b in zip(joined.tensors(), one.tensors(), strict=True))
        targets = one.sequences["targets"]
        own = [t.tolist() for t in targets.values.split(targets.lengths.tolist())]
        assert sorted(map(len, own)) == [0, 1, 2, 2]
        if per == "batch":
            assert set(one.shared["negatives"].tolist()) == {id for ids in own for id in ids}
            continue
        held = one.dense["negatives"] if per == "sample" else one.sequences["negatives"].values
        homes = [n for n, ids in enumerate(own) for _ in (ids if per == "position" else [0])]
        for home, drawn in zip(homes, held.tolist(), strict=True):
            near = [own[(home + step) % 4] for step in (1, 2)]
            assert set(drawn) == {id for ids in near for id in ids}
    with pytest.raises(ValueError, match="no catalogue"):
        load_histories(path, 4, **options | {"in_batch_share": 0.5})


def test_popularity_of_some_ids(csv, tmp_path):
    path = prepare(csv, tmp_path / "cache", any_ids=True)
    data = load_histories(path, 4, any_ids=True, in_batch_share=1.0, kind="none")
    asked = ["sku-1", "-1", "nothing", "7"]
    counts = data.count_items_of(torch.tensor([expect_id(text) for text in asked]))
    items = [item for _, item, _ in EVENTS]
    assert counts.tolist() == [items.count(text) for text in asked]


def test_histories_of_any_ids_are_padded():
    history = Jagged(torch.tensor([-1, 5, -1, LEAST, 5, 0]), torch.tensor([4, 0, 2]))
    targets = torch.tensor([5, -1, 0])
    padded, there = _pad(history, targets)
    listed, kept = _list_seen(padded, targets)
    assert ((padded == targets[:, None]) & there).any(1).tolist() == [True, False, True]
    found = [set(row[mask].tolist()) for row, mask in zip(listed, kept)]
    assert found == [{-1, LEAST}, set(), {5}] and kept.sum() == 3


def invoke(*arguments):
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def train_dynamic(csv, run, *more):
    small = "--steps 3 --width 8 --layers 1 --heads 1 --device cpu --profile-steps 0"
    return invoke(
        "train", "--data", csv, "--cache", run.parent / "cache", "--folder", run, *small.split(),
        "--rows", "item=dynamic:4096", *more,
    )  # fmt: skip


def read_targets(path):
    """By user, from what `eval --ranks` writes."""
    with open(path, newline="") as file:
        return {row["user_id"]: row["item_id"] for row in text_tables.DictReader(file)}


def test_ranks_without_a_vocabulary_have_hashes_and_say_so(csv, tmp_path):
    train_dynamic(csv, tmp_path / "run", "--no-vocabulary")
    told = invoke("eval", tmp_path / "run", "--ranks", tmp_path / "ranks.csv")
    assert "item ids that are strings are listed as their hashes: --no-vocabulary" in told
    expected = {user: str(expect_id(item)) for user, item, _ in EVENTS}  # the last one of each
    assert read_targets(tmp_path / "ranks.csv") == expected


def test_a_csv_of_strings_is_trained_on_evaluated_and_exported(csv, tmp_path):
    run = tmp_path / "run"
    told = train_dynamic(csv, run)
    assert "4 of them strings hashed to 64 bits" in told and "9 different item ids" in told
    other = tmp_path / "other.csv"  # the same ids in another order
    head, *lines = csv.read_text().splitlines()
    other.write_text("\n".join([head, *reversed(lines), ""]))
    found = []
    for data in ([], ["--data", other]):
        told = invoke("eval", run, *data, "--ranks", tmp_path / "ranks.csv")
        written = told.split("all metrics are in ")[1].split()[0]
        found.append(json.loads(Path(written).read_text())["quality"])
        assert "hashes" not in told
        expected = {user: item for user, item, _ in EVENTS}  # the last one of each
        assert read_targets(tmp_path / "ranks.csv") == expected
    for who in ("model", "popularity"):
        assert found[0][who] == pytest.approx(found[1][who], rel=1e-6), who
    assert found[0]["model"]["hr@10"] > 0
    invoke("export", run, "--out", tmp_path / "out")
    table = load_file(tmp_path / "out" / "table.item.safetensors")
    vocabulary = pq.read_table(tmp_path / "out" / "vocabulary.parquet").to_pylist()
    names = {row["id"]: row["text"] for row in vocabulary if row["column"] == "item_id"}
    exported = {names.get(id, str(id)) for id in table["ids"].tolist()}
    assert exported <= {item for _, item, _ in EVENTS} and "sku-1" in exported
    assert np.isfinite(table["weight"].numpy()).all()
