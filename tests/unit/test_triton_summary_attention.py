"""The Triton attention over segments against the reference, through Triton's interpreter, in a
separate process."""

from __future__ import annotations

import pytest
from helpers import interpreter, segments_cases


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(segments_cases.__file__)


@pytest.mark.parametrize("case", segments_cases.CASES)
def test_equals_the_plain_attention(interpreted, case):
    limit = 2e-3 if "dtype" in segments_cases.CASES[case] else 1e-5
    # NaN fails
    assert interpreted[case] and all(error < limit for error in interpreted[case].values()), (
        interpreted[case]
    )


def test_samples_do_not_reach_each_other(interpreted):
    assert interpreted["isolation"] == {"before": True, "after": True}
