"""The Triton operations of a layer against the reference, through Triton's interpreter; their
checks, without a launch."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import interpreter, layer_cases

from freescale.kernels.layer.triton import gated_norm, layer_norm, silu_split


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(layer_cases.__file__)


def holds(found, limit):
    return bool(found) and all(
        value < limit if isinstance(value, float) else value is True for value in found.values()
    )


@pytest.mark.parametrize("case", layer_cases.CASES)
def test_equals_the_plain_one(interpreted, case):
    options = layer_cases.CASES[case]
    assert holds(interpreted[case], layer_cases.LIMITS[options.get("out") or options["dtype"]]), (
        interpreted[case]
    )


@pytest.mark.parametrize("case", layer_cases.WHOLE)
def test_a_layer_equals_the_plain_one(interpreted, case):
    limit = 1e-5 if layer_cases.WHOLE[case]["dtype"] == "float32" else 5e-3
    assert holds(interpreted[case], limit), interpreted[case]


@pytest.mark.parametrize("case", layer_cases.FUSED)
def test_fused_layers_equal_the_plain_ones(interpreted, case):
    limit = 1e-5 if layer_cases.FUSED[case]["dtype"] == "float32" else 5e-3
    assert holds(interpreted[case], limit), interpreted[case]


@pytest.mark.parametrize("case", layer_cases.ENCODED)
def test_encodings_equal_the_plain_ones(interpreted, case):
    assert holds(interpreted[case], 1e-5 if "half" not in case else 5e-3), interpreted[case]


@pytest.mark.parametrize("case", layer_cases.DLRM)
def test_a_dlrm_equals_the_plain_one(interpreted, case):
    assert holds(interpreted[case], 1e-4), interpreted[case]


@pytest.mark.parametrize("case", layer_cases.SASREC)
def test_sasrec_equals_the_plain_one(interpreted, case):
    assert len(interpreted[case]) > 15 and holds(interpreted[case], 1e-4), interpreted[case]


class TestBadInput:
    def refused(self, message, function=gated_norm, **changes):
        arguments = {
            "x": torch.zeros(5, 8),
            "weight": torch.zeros(8),
            "bias": torch.zeros(8),
            "eps": 1e-6,
            "dtype": torch.float32,
        }
        if function is gated_norm:
            arguments |= {
                "gate": torch.zeros(5, 8),
                "keys": torch.zeros(5, dtype=torch.int64),
                "keep": 0.5,
            }
        with pytest.raises(ValueError, match=message):
            function(**(arguments | changes))

    def test_shapes(self):
        self.refused("gate must be", gate=torch.zeros(5, 9))
        self.refused("x must be", layer_norm, x=torch.zeros(5))
        self.refused("weight must be", layer_norm, weight=torch.zeros(7))
        self.refused("bias must be", bias=torch.zeros(8, 1))
        self.refused("one per token", keys=torch.zeros(4, dtype=torch.int64))
        self.refused(
            "wide",
            layer_norm,
            x=torch.zeros(2, 5000),
            weight=torch.zeros(5000),
            bias=torch.zeros(5000),
        )

    def test_dtypes(self):
        self.refused("x must be", x=torch.zeros(5, 8, dtype=torch.float64))
        self.refused("gate must be", gate=torch.zeros(5, 8, dtype=torch.int32))
        self.refused("weight must be", weight=torch.zeros(8, dtype=torch.float64))
        self.refused("result can be", dtype=torch.float64)
        self.refused("keys must be int64", keys=torch.zeros(5, dtype=torch.int32))

    def test_numbers(self):
        self.refused("keep must be", keep=0.0)
        self.refused("keep must be", stream=-1)

    def test_devices(self):
        self.refused("different devices", layer_norm, weight=torch.zeros(8, device="meta"))

    def test_parts(self):
        for sizes in ([4, 4], [2, 2, 2, 3], [4, 2, 2, 0]):
            with pytest.raises(ValueError, match="four widths"):
                silu_split(torch.zeros(5, 8), sizes)
        with pytest.raises(ValueError, match="x must be"):
            silu_split(torch.zeros(5, 8, dtype=torch.float64), [2, 2, 2, 2])

    @pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone")
    def test_no_gpu(self):
        self.refused("on a GPU")
        self.refused("on a GPU", layer_norm)
        with pytest.raises(ValueError, match="on a GPU"):
            silu_split(torch.zeros(5, 8), [2, 2, 2, 2])
