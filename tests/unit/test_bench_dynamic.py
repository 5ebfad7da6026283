"""The benchmark of dynamic tables: the ids that it trains on, and how arms are compared."""

from __future__ import annotations

import pytest
import torch
from freescale_bench.common.results import make_claims
from freescale_bench.dynamic.step import (
    ARMS,
    FAR,
    TARGETS,
    choose_setting,
    collect_figures,
    join_ranks,
    make_dynamic,
    renew_ids,
)

from freescale.batch import Jagged, SequenceBatch
from freescale.config import DataConfig, RunConfig, TrainConfig
from freescale.embedding.dynamic_rules import Dynamic

MS = 10**6  # nanoseconds


def test_a_tenth_of_the_ids_is_new_in_every_batch():
    ids, lengths = torch.arange(1, 20_001), torch.tensor([8000, 12_000])
    batch = SequenceBatch(
        sequences={"history": Jagged(ids, lengths), "targets": Jagged(ids.flip(0), lengths)},
        shared={"negatives": ids[::2]},
    )
    seen: set[int] = set()
    for number in (0, 1, 7):
        renewed = renew_ids(batch, number)
        found = renewed.values("history")
        new = found > FAR
        assert 0.09 < float(new.double().mean()) < 0.11
        assert torch.equal(found[~new], ids[~new])
        # an id is new wherever it occurs
        assert torch.equal(renewed.values("targets").flip(0), found)
        assert torch.equal(renewed.shared["negatives"], found[::2])
        assert not seen & set(found[new].tolist())
        seen |= set(found[new].tolist())


def test_dynamic_arms_have_as_many_rows_as_the_static_one():
    """And are runs that the configuration allows: it refuses a catalogue beside a dynamic table."""
    data = DataConfig(data="file", num_items=40_960, in_batch_share=1.0)
    static = RunConfig(data=data, train=TrainConfig(placement="item=sharded"))
    for options in filter(None, ARMS.values()):
        dynamic = make_dynamic(static, options)
        assert dynamic.dynamic_tables == {"item": f"dynamic:40960{options}"}
        assert dynamic.train.placement == static.train.placement


def test_arms_are_compared_window_by_window():
    def row(arm, windows, exposed):
        medians = {"step_ms": {"median": 10.0}, "exposed_and_lanes_ms": {"median": exposed}}
        return {"arm": arm, "windows_ms": windows, **medians}

    rows = [
        row("static", [10.0, 20.0, 10.0], 0.5),
        row("device map", [11.0, 22.0, 30.0], 0.6),
        row("host map", [12.0, 24.0, 30.0], 0.8),
    ]
    figures = collect_figures(rows)
    assert figures["device map"] == pytest.approx(1.1)
    assert figures["device map exposed"] == pytest.approx(1.0)
    # what is claimed is what users get
    claims = [claim["measured"] for claim in make_claims(TARGETS, figures)]
    assert Dynamic(1).maps_on_device and claims == pytest.approx([1.1, 1.0])


def test_waits_of_a_step_are_exposed_the_lanes_own_or_for_late_ranks():
    """Two ranks, in milliseconds: the second one arrives late at a collective of its lane, which
    takes a while; then both lanes work on alone."""

    def record(arrives):
        spans = [["forward", 0, arrives], ["arrive", arrives, 9 * MS]]
        return {
            "step": 1, "begin": 0, "end": 20 * MS, "spans": spans, "lanes": 3 * MS, "counters": {},
            "collectives": [["ids", 8, 8, arrives, arrives, 6 * MS]],
        }  # fmt: skip

    ranks = [{"records": [record(at)], "windows_ms": [20.0]} for at in (1 * MS, 4 * MS)]
    row = join_ranks("static", ranks)
    names = ("exposed", "lanes", "exposed_and_lanes", "straggler", "waited_for_lanes")
    # 3 ms of the first rank are straggler time; it waits for 8 ms, the other one for 5
    assert [row[f"{name}_ms"]["median"] for name in names] == [2.0, 3.0, 5.0, 1.5, 6.5]


def test_sizes():
    setting = choose_setting("cuda", 4, True, {})
    assert (setting.rows, setting.shape.samples, setting.keep) == (50_000_000, 256, True)
    assert not choose_setting("cpu", 1, True, {}).keep
    with pytest.raises(ValueError, match="--steps"):
        choose_setting("cpu", 1, False, {"steps": 3})
