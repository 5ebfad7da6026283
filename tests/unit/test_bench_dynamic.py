"""The benchmark of dynamic tables: the ids that it trains on, and how arms are compared."""

from __future__ import annotations

import pytest
import torch

from freescale.batch import Jagged, SequenceBatch
from freescale.bench.dynamic.step import (
    ARMS,
    FAR,
    choose_setting,
    collect_figures,
    make_dynamic,
    renew_ids,
)
from freescale.config import DataConfig, RunConfig, TrainConfig


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
    def row(arm, windows, exposed, waited):
        spread = {"exposed_ms": {"median": exposed}, "waited_for_lanes_ms": {"median": waited}}
        return {"arm": arm, "windows_ms": windows, "step_ms": {"median": 10.0}, **spread}

    rows = [
        row("static", [10.0, 20.0, 10.0], 1.0, 0.5),
        row("device map", [11.0, 22.0, 30.0], 1.0, 0.6),
    ]
    figures = collect_figures(rows)
    assert figures["device map"] == pytest.approx(1.1)
    assert figures["device map exposed"] == pytest.approx(1.0)


def test_sizes():
    setting = choose_setting("cuda", 4, True, {})
    assert (setting.rows, setting.shape.samples, setting.keep) == (50_000_000, 256, True)
    assert not choose_setting("cpu", 1, True, {}).keep
    with pytest.raises(ValueError, match="--steps"):
        choose_setting("cpu", 1, False, {"steps": 3})
