import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from freescale.pipeline.process_memory import freeze_objects

# Examples are drawn slowly on a busy machine; no test depends on its speed.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # two test processes on two cores would otherwise fight for them

SHARED = "FREESCALE_TESTS_SHARED"  # a folder of all processes of this run, removed at its end


def pytest_configure(config):
    if SHARED not in os.environ:
        os.environ[SHARED] = tempfile.mkdtemp(prefix="freescale-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED), ignore_errors=True))


@pytest.fixture(scope="session", autouse=True)
def objects_of_the_suite_stay_frozen():
    """Every schedule collects garbage first: over all that the test process has imported it takes
    longer than most of the schedules in tests."""
    with freeze_objects():
        yield


def pytest_collection_modifyitems(items):
    """Long tests begin first: one that begins last would be waited for alone. xdist hands each of
    its processes a part of the list, the first of them the first part."""
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    processes, ordered = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)), []
    for place in range(processes):
        begin = long[place::processes]
        size = max(0, (len(items) - len(ordered)) // (processes - place) - len(begin))
        ordered += begin + others[:size]
        del others[:size]
    items[:] = ordered + others


def pytest_make_parametrize_id(config, val):
    """Names for values that pytest would only number: dtypes, and short rows of numbers."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    row = isinstance(val, list | tuple) and 0 < len(val) <= 6
    if row and all(isinstance(entry, int | float) for entry in val):
        return ",".join(map(str, val))
    return None
