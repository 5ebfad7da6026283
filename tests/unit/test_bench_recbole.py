"""`freescale bench quality --recbole` with RecBole's row out of an earlier result."""

from __future__ import annotations

import json

import numpy as np
import pytest
from freescale_bench.common.results import Destination
from freescale_bench.quality.bench import Plan
from freescale_bench.quality.recbole import PEER, bench_recbole, read_earlier
from freescale_bench.quality.table import format_recbole

from freescale.ledger.collector import describe_machine

TINY = ["width=8", "layers=1", "heads=1", "epochs=1", "max_length=6", "negatives=3"]
ROW = {"arm": PEER, "seconds": 3e4, "epochs": 20, "hr@10": 0.5, "ndcg@10": 0.25}


@pytest.fixture
def data(tmp_path):
    """Users with 4 to 9 events of 30 items."""
    random = np.random.default_rng(0)
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    for user in range(12):
        items = random.permutation(np.arange(1, 31))[: 4 + user % 6]
        lines += [f"{user}\t{item}\t{time}" for time, item in enumerate(items)]
    path = tmp_path / "events.inter"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def write_earlier(tmp_path):
    def write(**changes):
        result = {"command": "freescale bench quality --recbole", "machine": describe_machine()}
        result |= {"commit": "abc", "date": "2026-11-17T17:59:27Z"}
        result |= {"rows": [{"arm": "hstu-small"}, ROW]}
        path = tmp_path / "quality-earlier.json"
        path.write_text(json.dumps(result | changes))
        return path

    return write


def test_a_recipe_beside_an_earlier_row(data, write_earlier, tmp_path):
    plan = Plan(
        data=str(data), name="events", recipe="sasrec", changes=TINY, device="cpu", seeds=2,
        run_folder=tmp_path / "runs", peer_figures=write_earlier(),
    )  # fmt: skip
    # an interpreter that would fail if it were called
    bench_recbole(plan, str(tmp_path / "none"), Destination(tmp_path / "results", "def"))
    path = tmp_path / "results" / "quality-sasrec-events-recbole-cpu.json"
    result = json.loads(path.read_text())
    own, peer = result["rows"]
    source = {"file": "quality-earlier.json", "commit": "abc", "date": "2026-11-17T17:59:27Z"}
    assert peer == {"from": source, **ROW}
    assert result["commit"] == "def" and result["command"].endswith("--peer-figures FILE --recbole")
    gains = []
    for seed, one in enumerate(own["seeds"]):
        table = np.loadtxt(tmp_path / f"runs/seed-{seed}/ranks.csv", delimiter=",", skiprows=1)
        ranks = table[:, 2]  # among all items
        gains.append(np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0).mean())
        assert one["hr@10"] == pytest.approx((ranks <= 10).mean())
    assert len(gains) == 2 and gains[0] != gains[1]
    assert [one["ndcg@10"] for one in own["seeds"]] == pytest.approx(gains)
    assert own["ndcg@10"] == pytest.approx(np.mean(gains))
    assert own["seconds"] == pytest.approx(np.mean([one["seconds"] for one in own["seeds"]]))
    hits, gain, seconds = (claim["measured"] for claim in result["claims"])
    assert hits == pytest.approx(own["hr@10"] / 0.5, abs=1e-4)
    assert gain == pytest.approx(own["ndcg@10"] / 0.25, abs=1e-4)
    assert seconds == pytest.approx(own["seconds"] / 3e4, abs=1e-4)
    table = format_recbole({path.stem: result}, "results")
    assert table.splitlines()[3] == "| events | RecBole's SASRec | 20 | 30,000 | 0.5000 | 0.2500 |"
    assert "RecBole's SASRec on events: from an earlier run, 2026-11-17." in table
    # what was an earlier row here keeps saying where it was measured
    again = read_earlier(path, describe_machine(), plan.describe_data())
    assert again == peer


def test_rows_that_say_nothing_about_this_run(data, write_earlier):
    machine, dataset = describe_machine(), Plan(data=str(data), name="events").describe_data()
    other = write_earlier(machine=machine | {"cores": machine["cores"] + 1})
    with pytest.raises(ValueError, match="another machine, cores"):
        read_earlier(other, machine, dataset)
    other = write_earlier(dataset=dataset | {"sha256": "0"})
    with pytest.raises(ValueError, match="is of other data"):
        read_earlier(other, machine, dataset)
    other = write_earlier(rows=[{"arm": "hstu-small"}])
    with pytest.raises(ValueError, match="no row of RecBole's SASRec"):
        read_earlier(other, machine, dataset)
    same = write_earlier(machine=machine | {"memory_gib": 1}, dataset=dataset)
    assert read_earlier(same, machine, dataset)["seconds"] == ROW["seconds"]
