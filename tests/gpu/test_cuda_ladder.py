"""Eight ranks on one GPU with the settings of the ladder `train`: staged is serial, to the bit.

The ladder's arms differ by up to a third in single losses, because they sum dense gradients in
different orders and rounding grows. With the same `--dense-sums` nothing differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from freescale_bench.ladder.product import write_histories
from helpers import ladder_bits

from freescale.transport.shared_gpu import PART

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RANKS, STEPS = 8, 100


def test_staged_is_serial_over_nccl_with_the_ladder_s_settings(tmp_path):
    histories, result = write_histories("cuda", str(tmp_path)), tmp_path / "result.json"
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    what = [ladder_bits.__file__, "cuda", "cuda", str(STEPS), str(histories), str(result)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        PART: str(100 // RANKS),
    }
    command = [sys.executable, *start, *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=420, env=environment)
    assert done.returncode == 0, done.stderr[:3000]  # the rank that failed first
    everyone = json.loads(Path(result).read_text())
    assert len(everyone) == RANKS
    for found in everyone:
        for arm, (_, expected) in ladder_bits.ARMS.items():
            if expected is not None:
                assert found[arm]["losses"] == found[expected]["losses"]
                assert found[arm]["weights"] == found[expected]["weights"]
    # the control: the other order of dense sums has other bits
    first, second = (everyone[0][f"serial, {sums}"] for sums in ("collective", "partitioned"))
    assert first["losses"][0] == second["losses"][0] and first["losses"] != second["losses"]
    assert first["weights"] != second["weights"]
