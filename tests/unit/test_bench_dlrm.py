"""`freescale bench dlrm`: its sizes, its batches, and what stands in for fbgemm."""

from __future__ import annotations

import numpy as np
import torch
from freescale_bench.common.results import Destination
from freescale_bench.dlrm.host import bench_host
from freescale_bench.dlrm.hot_ids import TRACKS, compare, heat
from freescale_bench.dlrm.learning import TRIAL, measure
from freescale_bench.dlrm.shapes import FULL, SMALL, build_model, draw_lengths, make_batch
from freescale_bench.dlrm.stand_ins import dense_to_jagged, jagged_to_padded_dense

from freescale.batch import compute_offsets


def test_tables_and_lengths_are_those_of_mlperf() -> None:
    assert sum(FULL.rows) + sum(FULL.context) == 293_051_712  # 600 GB of 512 floats each
    eighth = FULL.divide(8)
    assert 8 * (sum(eighth.rows) + sum(eighth.context)) - 293_051_712 in range(8 * 11)
    lengths = draw_lengths(FULL, 100_000, True, 0)
    assert abs(np.median(lengths) - 2695) < 40 and lengths.max() == FULL.longest
    assert set(draw_lengths(FULL, 5, False, 0)) == {FULL.longest}


def test_a_batch_is_one_the_model_reads() -> None:
    batch = make_batch(SMALL, draw_lengths(SMALL, 6, True, 0), 0)
    for name, rows in (("item_features", sum(SMALL.rows[1:])), ("context", sum(SMALL.context))):
        column = batch.values("history_features" if name[0] == "i" else "context_features")
        assert column.min() >= 0 and column.max() < rows
    history, times = batch.sequences["history"], batch.values("timestamps")
    now = torch.repeat_interleave(batch.values("candidate_timestamps"), history.lengths)
    assert (times < now).all()
    for part in torch.split(times, history.lengths.tolist()):
        assert (part.diff() > 0).all()
    loss = build_model(SMALL)(batch)["listen_plus"]
    assert 0 < float(loss.detach()) / len(batch) < 1


def test_stand_ins_pad_and_cut() -> None:
    lengths = torch.tensor([2, 0, 3])
    values, offsets = torch.arange(10.0).view(5, 2) + 1, compute_offsets(lengths)
    padded = jagged_to_padded_dense(values, [offsets], [3])
    assert padded[0].tolist() == [[1, 2], [3, 4], [0, 0]] and not padded[1].any()
    assert padded[2].tolist() == [[5, 6], [7, 8], [9, 10]]
    assert torch.equal(dense_to_jagged(padded, [offsets])[0], values)


def test_learning_compares_with_the_oracle_of_the_same_samples(tmp_path) -> None:
    ours, oracle = measure(TRIAL, tmp_path, None)
    assert 0.75 < oracle["auc"] < 0.92 and oracle["tested_samples"] > 100
    assert 0.3 < ours["auc"] < oracle["auc"] and len(ours["auc_by_window"]) == 2


def test_a_hot_album_is_in_its_share_of_the_events() -> None:
    batch = make_batch(SMALL, draw_lengths(SMALL, 40, False, 0), 0, skew=1.0)
    hot = heat(batch, SMALL, 0.3, 0)
    album = hot.values("history_features")[:, 1] == SMALL.rows[1] + SMALL.rows[2] // 2
    assert 0.25 < album.float().mean() < 0.35
    assert (hot.values("history")[album] < TRACKS).float().mean() > 0.9  # others are by chance
    assert torch.equal(hot.values("timestamps"), batch.values("timestamps"))
    assert hot.values("context_features").max() < sum(SMALL.context)
    assert torch.equal(heat(batch, SMALL, 0.0, 0).values("history"), batch.values("history"))


def test_the_worst_ranks_are_compared() -> None:
    uniform = {"step_memory_bytes": [8, 10], "bytes_sent": [1, 2], "bytes_received": [4, 4]}
    hot = {"step_memory_bytes": [5, 9], "bytes_sent": [3, 0], "bytes_received": [2, 4]}
    assert compare([uniform, hot]) == {"memory": 0.9, "sent": 1.5, "received": 1}


def test_host_tables_take_turns_and_evict(tmp_path, capsys) -> None:
    bench_host("cpu", None, True, Destination(tmp_path))
    rows = [eval(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    device, context, every = rows
    assert [row["step_ms"]["repetitions"] for row in rows] == [2, 2, 2]
    assert not device["cache_wanted"] and 0 < context["cache_wanted"] < every["cache_wanted"]
    assert 0 < every["cache_missed"] < every["cache_wanted"] and every["cache_bytes_down"]
    assert not list(tmp_path.iterdir())
