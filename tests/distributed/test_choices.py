"""What a run chooses where its options say auto: the same on all ranks, and repeated on resume."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from helpers.collisions import build, colliding, train
from helpers.ranks import run_ranks
from helpers.wires import wired

from freescale.ledger.ledger import Ledger
from freescale.pipeline import choices
from freescale.pipeline.choices import DenseSums, choose_dense_sums
from freescale.pipeline.precision import choose_precision, hold_matmul_precision
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.local import LocalTransport


def test_the_slowest_rank_decides_how_dense_gradients_are_summed():
    quick, slow = {"collective": 0.5, "partitioned": 0.1}, {"collective": 0.4, "partitioned": 0.6}
    assert choose_dense_sums([quick, quick]).kind == "partitioned"
    chosen = choose_dense_sums([quick, slow])
    assert chosen.kind == "collective" and "500.00 ms" in chosen.reason, chosen
    even = {"collective": 0.1, "partitioned": 0.099}
    assert choose_dense_sums([even]).kind == "collective"


@pytest.mark.parametrize(
    ("requested", "device", "bf16", "float32", "kind"),
    [
        ("auto", "cpu", False, True, "fp32"),
        ("auto", "cuda", True, True, "bf16"),
        ("auto", "cuda", False, True, "fp32"),
        ("auto", "cuda", True, False, "fp32"),
        ("fp32", "cuda", True, True, "fp32"),
        ("tf32", "cuda", True, True, "tf32"),
        ("bf16", "cpu", False, True, "bf16"),
    ],
)
def test_precision(requested, device, bf16, float32, kind):
    assert choose_precision(requested, device, bf16, float32)[0] == kind


def test_precisions_that_are_refused():
    with pytest.raises(ValueError, match="tf32 is a format of NVIDIA GPUs"):
        build(LocalTransport(), "serial", precision="tf32")
    with pytest.raises(ValueError, match="precision must be one of"):
        build(LocalTransport(), "serial", precision="fp16")


def read_tf32() -> tuple[str, str]:
    backends = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


@pytest.mark.parametrize("before", ["highest", "medium"])
def test_products_have_the_precision_that_is_asked_for_during_a_step_alone(before):
    cuda, usual = torch.device("cuda"), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    outside = read_tf32()
    try:
        with hold_matmul_precision("fp32", cuda):
            assert "tf32" not in read_tf32()
        assert read_tf32() == outside
        with hold_matmul_precision("tf32", cuda):
            assert read_tf32() == ("tf32", "tf32")
        with hold_matmul_precision("bf16", cuda):
            assert read_tf32() == outside
        with hold_matmul_precision("fp32", torch.device("cpu")):
            assert read_tf32() == outside
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(usual)


def _refuse(*_):
    raise AssertionError("a choice that is known is not measured again")


def _choose(transport):
    """Measured once, repeated by a run that resumes, and left alone by one that asks."""
    kind, shared = wired("shared memory")
    over = HostwireTransport(
        "cpu", Ledger(), transport.group, transport.control, kind, shared=shared
    )
    _, first = build(over, "staged", dense_sums="auto")
    assert "dense_sums" not in first.state_dict()["choices"]
    first.tune()
    measured = first.schedule.choices.dense_sums
    zeros = all(not flat.any() for flat in first.schedule.buckets.flat)
    repeated = {}
    for chosen in ("collective", "partitioned"):
        _, again = build(over, "serial", dense_sums="auto")
        again.load_state_dict(
            {**first.state_dict(), "choices": {"precision": "bf16", "dense_sums": chosen}}
        )
        with patch.object(choices, "measure_dense_sums", _refuse):
            again.tune()
        repeated[chosen] = (
            again.schedule.choices.dense_sums.kind,
            again.schedule.choices.partitioned is not None,
            again.state_dict()["choices"],
            again.describe_choices(),
        )
        again.close()
    _, requested = build(over, "serial", dense_sums="collective", precision="fp32")
    requested.load_state_dict(
        {**first.state_dict(), "choices": {"precision": "bf16", "dense_sums": "partitioned"}}
    )
    found = measured, zeros, repeated, requested.state_dict()["choices"]
    first.close()
    over.close()
    return found


def test_dense_sums_are_measured_once_and_repeated_on_resume():
    found = run_ranks(2, _choose)
    assert found[0] == found[1]  # to the figures of the reason: they are the slowest rank's
    measured, zeros, repeated, requested = found[0]
    assert measured.kind in ("collective", "partitioned") and measured.reason.startswith("measured")
    assert zeros
    for chosen, (kind, summing, state, lines) in repeated.items():
        assert kind == chosen and summing == (chosen == "partitioned")
        assert state == {"precision": "bf16", "dense_sums": chosen}
        assert lines == [
            "precision bf16 (as in the checkpoint)",
            f"dense sums {chosen} (as in the checkpoint)",
        ]
    assert requested == {"precision": "fp32", "dense_sums": "collective"}


def _train_with(transport, kind):
    """With the choice that a measurement would make."""
    wire, shared = wired("shared memory")
    over = HostwireTransport(
        "cpu", Ledger(), transport.group, transport.control, wire, shared=shared
    )
    chosen = DenseSums(kind, "as the test says")
    with patch.object(choices, "choose_dense_sums", lambda seconds: chosen):
        losses, _ = train(over, "staged", colliding(0.3, steps=4), dense_sums="auto")
    paths = [step["paths"].get("dense", {}) for step in over.ledger.drain()]
    over.close()
    return losses, {path for step in paths for path in step}


def test_what_was_measured_is_what_sums():
    """On three ranks: two of a CPU exchange small sums either way."""
    summed = {kind: run_ranks(3, _train_with, kind)[0] for kind in ("collective", "partitioned")}
    assert summed["collective"][1] == {"gloo"}
    assert summed["partitioned"][1] == {"hostwire: shared memory"}
    assert summed["collective"][0] == pytest.approx(summed["partitioned"][0], rel=1e-9)


def _plain(transport):
    _, pipeline = build(transport, "serial", dense_sums="auto")
    with patch.object(choices, "measure_dense_sums", _refuse):
        pipeline.tune()
    return pipeline.state_dict()["choices"], pipeline.describe_choices()


def test_nothing_is_measured_where_there_is_nothing_to_choose():
    state, lines = run_ranks(2, _plain)[0]
    assert (
        state["dense_sums"] == "collective"
        and "exchanges go through the process group, too" in lines[1]
    )
    state, lines = _plain(LocalTransport())
    assert state == {"precision": "fp32"} and len(lines) == 1


def test_one_rank_passes_on_what_several_have_chosen():
    _, pipeline = build(LocalTransport(), "serial", dense_sums="auto")
    chosen = {"precision": "fp32", "dense_sums": "partitioned"}
    pipeline.load_state_dict({**pipeline.state_dict(), "choices": chosen})
    pipeline.tune()
    assert pipeline.state_dict()["choices"] == chosen
