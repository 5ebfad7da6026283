import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # two test processes on two cores would otherwise fight for them


def pytest_make_parametrize_id(config, val):
    """Names for values that pytest would only number: dtypes, and short rows of numbers."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    row = isinstance(val, list | tuple) and 0 < len(val) <= 6
    if row and all(isinstance(entry, int | float) for entry in val):
        return ",".join(map(str, val))
    return None
