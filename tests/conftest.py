import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # two test processes on two cores would otherwise fight for them

SHARED = "FREESCALE_TESTS_SHARED"  # a folder of all processes of this run, removed at its end


def pytest_configure(config):
    if SHARED not in os.environ:
        os.environ[SHARED] = tempfile.mkdtemp(prefix="freescale-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED), ignore_errors=True))


def pytest_make_parametrize_id(config, val):
    """Names for values that pytest would only number: dtypes, and short rows of numbers."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    row = isinstance(val, list | tuple) and 0 < len(val) <= 6
    if row and all(isinstance(entry, int | float) for entry in val):
        return ",".join(map(str, val))
    return None
