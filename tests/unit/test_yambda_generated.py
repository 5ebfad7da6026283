"""Generated events in Yambda's layout: its statistics, and preferences that a model can find."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from freescale_bench.dlrm import generate as yambda
from freescale_bench.dlrm.generate import (
    CAP,
    MEDIAN,
    SIGMA,
    compute_chances,
    generate_yambda,
)

from freescale.cli.main import main
from freescale.data.ingest.interactions import read_interactions
from freescale.data.ingest.yambda import write_items
from freescale.data.synthetic.draws import LengthDistribution
from freescale.train.evaluate import area_under_curve

SMALL = {"users": 150, "items": 2000, "median": 150, "cap": 900}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yambda")
    return folder, generate_yambda(folder, **SMALL, seed=4)


def read_events(folder):
    return pq.read_table(folder / "multi_event.parquet")


def test_lengths_have_the_published_median_mean_and_maximum():
    lengths = LengthDistribution.from_options("lognormal", MEDIAN, SIGMA, 0.0, CAP)
    assert lengths.mean == pytest.approx(4763, rel=1e-3)
    assert int(np.searchsorted(lengths.ends, 0.5)) == pytest.approx(2695, abs=1)
    drawn = lengths.draw(0, torch.arange(20_000))
    assert drawn.max() == CAP and (drawn == CAP).mean() < 0.03


def test_the_layout_is_the_published_one(made):
    folder, report = made
    table = read_events(folder)
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds == {
        "uid": "uint32", "timestamp": "uint32", "item_id": "uint32", "is_organic": "uint8",
        "played_ratio_pct": "uint16", "track_length_seconds": "uint32",
        "event_type": "dictionary<values=string, indices=int32, ordered=0>",
    }  # fmt: skip
    users, times, items = (table.column(name).to_numpy() for name in list(kinds)[:3])
    assert (np.lexsort((times, users)) == np.arange(len(users))).all()
    assert set(users) == set(range(1, 151)) and items.min() >= 1 and items.max() <= 2000
    assert (times % 5 == 0).all() and times.max() <= 26_000_000 and times.min() < 300_000
    listen = np.asarray(table.column("event_type").combine_chunks().dictionary_decode()) == "listen"
    for name in ("played_ratio_pct", "track_length_seconds"):
        assert (np.asarray(table.column(name).is_valid()) == listen).all()
    for kind in ("artist", "album"):
        mapping = pq.read_table(folder / f"{kind}_item_mapping.parquet")
        assert mapping.column_names == [f"{kind}_id", "item_id"] and mapping.num_rows > 1800
    assert len(users) == report.events and json.loads((folder / "truth.json").read_text())


def test_kinds_have_their_shares(made):
    folder, report = made
    actions = np.concatenate([b.column("action").to_numpy() for b in read_interactions(folder)])
    shares = [np.mean(actions == action) for action in (1, 4, 2, 0)]
    assert shares == pytest.approx([0.613, 0.359, 0.019, 0.009], rel=0.25, abs=0.03)
    kinds = report.kinds
    others = kinds["dislike"] + kinds["unlike"] + kinds["undislike"]
    assert shares == pytest.approx([kinds["listen_plus"], kinds["skip"], kinds["like"], others])
    assert sum(kinds.values()) == pytest.approx(1)


def test_tastes_and_the_artist_of_the_mapping_explain_what_is_listened_to(made, tmp_path):
    """The oracle's AUC, from the files and the hidden vectors."""
    folder, report = made
    write_items(folder, tmp_path / "items.parquet")
    items = pq.read_table(tmp_path / "items.parquet").drop_null()
    artist = np.zeros(2001, np.int64)
    artist[items.column("item_id").to_numpy()] = items.column("artist").to_numpy()
    table = read_events(folder).filter(read_events(folder).column("played_ratio_pct").is_valid())
    users, listened = table.column("uid").to_numpy(), table.column("item_id").to_numpy()
    catalogue = yambda._Catalogue(2000, 1.0, 4)
    tastes = catalogue.draw_vectors("taste", torch.arange(151))[users]
    known = artist[listened] > 0
    score = (tastes * catalogue.styles[artist[listened] - 1]).sum(1)[known]
    labels = table.column("played_ratio_pct").to_numpy()[known] >= 50
    found = area_under_curve(torch.from_numpy(score), torch.from_numpy(labels).float())
    assert found == pytest.approx(report.oracle_auc, abs=0.01) and found > 0.8
    chances = compute_chances(report, users.astype(np.int64), listened.astype(np.int64))
    played = table.column("played_ratio_pct").to_numpy() >= 50
    assert np.corrcoef(chances[known], score)[0, 1] > 0.9
    for low in (0.1, 0.5, 0.8):
        chosen = (chances >= low) & (chances < low + 0.1)
        assert played[chosen].mean() == pytest.approx(chances[chosen].mean(), abs=0.05)


def test_the_same_seed_gives_the_same_files_in_blocks_of_any_size(made, tmp_path, monkeypatch):
    folder, report = made
    monkeypatch.setattr(yambda, "_BLOCK", 3000)
    again = generate_yambda(tmp_path, **SMALL, seed=4)
    assert again == report
    for name in ("multi_event", "artist_item_mapping", "album_item_mapping"):
        one, two = (pq.read_table(path / f"{name}.parquet") for path in (folder, tmp_path))
        assert one.equals(two)
    assert pq.read_metadata(tmp_path / "multi_event.parquet").num_row_groups > 5
    other = generate_yambda(tmp_path / "other", **SMALL, seed=5)
    assert other.events != report.events


def test_a_hot_album(tmp_path):
    generate_yambda(tmp_path, **SMALL, hot_album=0.3)
    mapping = pq.read_table(tmp_path / "album_item_mapping.parquet")
    albums = np.zeros(2001, np.int64)
    albums[mapping.column("item_id").to_numpy()] = mapping.column("album_id").to_numpy()
    events = np.bincount(albums[read_events(tmp_path).column("item_id").to_numpy()])
    assert 0.28 < events[1:].max() / events.sum() < 0.36


def test_the_command(tmp_path):
    arguments = ["generate", tmp_path / "y", "--like", "yambda", "--users", 5, "--median", 20]
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == 0 and "5 users" in done.output and "47 items" in done.output
    assert "freescale train --data" in done.output and "listen_plus" in done.output
    wrong = CliRunner().invoke(main, [*map(str, arguments), "--collision", "0.1"])
    assert wrong.exit_code and "--collision" in wrong.output
