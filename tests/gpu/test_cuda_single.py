"""The schedule of a single rank on a GPU: the bits of the serial one, and no read of the device."""

from __future__ import annotations

import pytest
import torch
from helpers import single_cases
from helpers.gpu_training import differences
from helpers.toys import Clicks, clicks_batch

import freescale
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # Triton's kernels, plain torch's
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_bit_equal_to_serial(optimizer, dtype):
    assert differences(LocalTransport("cuda"), optimizer=optimizer, dtype=dtype) == []


@pytest.mark.parametrize("case", single_cases.CASES)
def test_bit_equal_in_every_case(case):
    """Rows with many chunks of gradients, among others."""
    torch.use_deterministic_algorithms(True)
    try:
        assert single_cases.differences(case, "cuda") == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_reads_nothing_of_the_device():
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        single_cases.Partial(dtype=torch.float32),
        Clicks.ids,
        transport=LocalTransport("cuda"),
        placement={"item": "sharded", "action": "replicated"},
    )
    dense = torch.optim.AdamW(parallel.dense_parameters(), fused=True)
    pipeline = freescale.Pipeline(parallel, dense, check=False)
    steps = pipeline.run([clicks_batch(40, seed) for seed in range(12)])
    for _ in range(4):  # both of the model's ways
        next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    list(steps)
