"""The Triton attention against the reference, through Triton's interpreter; its plan and its
checks, without Triton.

Triton reads the variable that selects the interpreter when it is imported, so the cases run in a
separate process.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from helpers import attention_cases, interpreter
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.kernels.attention import triton_plan as triton_attention_plan
from freescale.kernels.attention.plan import BUCKET_WIDTH
from freescale.kernels.attention.triton import hstu_attention
from freescale.kernels.attention.triton_plan import plan_attention


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(attention_cases.__file__)


@pytest.mark.parametrize("case", attention_cases.CASES)
def test_equals_the_plain_attention(interpreted, case):
    limit = 2e-3 if "dtype" in attention_cases.CASES[case] else 1e-5
    # NaN fails
    assert interpreted[case] and all(error < limit for error in interpreted[case].values()), (
        interpreted[case]
    )


def test_tiles_that_nobody_sees_are_not_visited(interpreted):
    assert len(interpreted["skipping"]) == 6 and all(interpreted["skipping"].values())


def test_samples_do_not_reach_each_other(interpreted):
    assert interpreted["isolation"] == {"before": True, "after": True}


@given(
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from([32, 64]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_tiles_hold_every_token_once(lengths, size, random):
    counts = [random.randint(0, n) for n in lengths]
    plan = plan_attention(
        torch.tensor(lengths, dtype=torch.int64),
        1,
        candidate_counts=torch.tensor(counts, dtype=torch.int64),
    )
    for table in (plan.query_tiles(size).numpy(), plan.key_tiles(size).numpy()):
        held = [
            start + row + n
            for start, length, _, row, *_ in table
            for n in range(min(size, length - row))
        ]
        assert sorted(held) == list(range(sum(lengths)))


def test_long_tiles_first():
    lengths = torch.tensor([300, 20000, 9000, 0, 20000])
    plan = plan_attention(lengths, 1)
    for table, cost in (
        (plan.query_tiles(128), lambda t: t[:, 3] + 128),
        (plan.key_tiles(128), lambda t: t[:, 1] - t[:, 3]),
    ):
        bands = cost(table.numpy()) // triton_attention_plan.BAND
        assert (np.diff(bands) <= 0).all() and bands[0] == 20000 // triton_attention_plan.BAND
    assert plan.query_tiles(128) is plan.query_tiles(128)  # made once


def testfind_bucket_edges_are_those_of_the_reference():
    edges = triton_attention_plan.find_bucket_edges(128)
    bucket = lambda x: x.double().log().div(BUCKET_WIDTH).to(torch.int64)  # noqa: E731
    number = torch.arange(1, 129)
    assert (bucket(edges[1:]) >= number).all() and (bucket(edges[1:] - 1) < number).all()


class TestBadInput:
    def refused(self, message, **changes):
        q, k, v = (torch.zeros(5, 2, 32) for _ in range(3))
        arguments = {
            "q": q,
            "k": k,
            "v": v,
            "lengths": torch.tensor([2, 3]),
            "scale_length": 9,
            "alpha": 0.1,
        }
        with pytest.raises(ValueError, match=message):
            hstu_attention(**(arguments | changes))

    def test_shapes(self):
        self.refused("do not fit", k=torch.zeros(5, 2, 64))
        self.refused("do not fit", v=torch.zeros(4, 2, 32))
        self.refused("heads .* wide", v=torch.zeros(5, 2, 129))
        self.refused("scale_length", scale_length=0)

    def test_dtypes(self):
        self.refused("one dtype", k=torch.zeros(5, 2, 32, dtype=torch.float16))
        self.refused(
            "one dtype", **{name: torch.zeros(5, 2, 32, dtype=torch.float64) for name in "qkv"}
        )
        self.refused("int64", lengths=torch.tensor([2, 3], dtype=torch.int32))
        self.refused(
            "candidate_counts must be int64",
            candidate_counts=torch.tensor([1, 1], dtype=torch.int32),
        )
        self.refused(
            "timestamps must be int64", time_bias=torch.zeros(4), timestamps=torch.zeros(5)
        )

    def test_sums(self):
        self.refused("lengths add up to 6", lengths=torch.tensor([2, 4]))
        self.refused("0 or more", lengths=torch.tensor([-1, 6]))
        self.refused("4 candidates among 3 tokens", candidate_counts=torch.tensor([0, 4]))

    def test_biases(self):
        self.refused("up to 2 apart", position_bias=torch.zeros(2))
        self.refused("needs timestamps", time_bias=torch.zeros(4))
        self.refused("1-d", position_bias=torch.zeros(2, 2))
        self.refused(
            "time buckets",
            time_bias=torch.zeros(9000),
            timestamps=torch.zeros(5, dtype=torch.int64),
        )

    def test_devices(self):
        self.refused("different devices", k=torch.zeros(5, 2, 32, device="meta"))

    @pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone")
    def test_no_gpu(self):
        self.refused("on a GPU")

    def test_plan_of_something_else(self):
        self.refused("lengths add up to 4", plan=plan_attention(torch.tensor([2, 2]), 2))
        self.refused("heads", plan=plan_attention(torch.tensor([2, 3]), 3))
        self.refused(
            "distances=True",
            plan=plan_attention(torch.tensor([2, 3]), 2),
            position_bias=torch.zeros(9),
        )
        self.refused(
            "neither",
            plan=plan_attention(torch.tensor([2, 3]), 2),
            candidate_counts=torch.tensor([0, 1]),
        )
