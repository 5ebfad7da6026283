"""Single events appended by the Triton kernels, through Triton's interpreter, in a separate
process: against the path that takes any number of events."""

from __future__ import annotations

import pytest
from helpers import incremental_cases, interpreter


@pytest.fixture(scope="module")
def interpreted():
    return interpreter.interpreted(incremental_cases.__file__)


@pytest.mark.parametrize("case", incremental_cases.CASES)
def test_equals_the_path_of_several_events(interpreted, case):
    found = interpreted[case]
    assert all(error < 1e-5 for error in found["worst"].values()), found  # NaN fails
    # (size, users with a single event and room for it)
    assert found["calls"] == [
        [4, 4],
        [4, 4],
        [2, 2],
        [4, 3],
        [4, 3],
        [2, 2],
        [1, 1],
        [4, 4],
        [4, 4],
    ]
    assert found["rebuilds"] == [0, 0, 0, 1]
