"""Rows and masks on a GPU: every case of the interpreter, and what only a GPU can show."""

from __future__ import annotations

import pytest
import torch
from helpers import kernel_cases

from freescale.kernels.requests import triton as triton_unique
from freescale.kernels.row_sums import triton as triton_row_sums
from freescale.kernels.row_updates import reference as row_updates
from freescale.kernels.row_updates import triton as triton_row_updates
from freescale.kernels.rows import triton as triton_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nothing has written is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", kernel_cases.ROWS)
def test_equals_its_twin(case):
    found = kernel_cases.ROWS[case]("cuda")
    assert kernel_cases.holds(found), found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reads_in_half_precision(dtype):
    assert kernel_cases.holds(kernel_cases.reads(128, "cuda", dtype), limit=5e-3)


@pytest.mark.parametrize("width", [1, 12, 100, 128, 512])
@pytest.mark.parametrize("name", kernel_cases.OPTIMIZERS)
def test_optimizers_equal_plain_torch(name, width):
    """Where a test of Adagrad alone fails, torch's addcmul rounds twice: set SQUARES_FUSED
    accordingly."""
    weight, states, numbers, gradients = kernel_cases.setting(
        name, width, "cuda", table=5000, used=3000
    )
    ours = kernel_cases.updated(triton_row_updates, name, weight, states, numbers, gradients)
    plain = kernel_cases.updated(row_updates, name, weight, states, numbers, gradients)
    for a, b in zip(ours, plain, strict=True):
        if name == "rowwise_adagrad":  # the sum over a row has another order
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
        elif name.startswith("adam"):  # torch rounds its quotients otherwise: seen up to 5e-7
            torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6)
        else:
            assert torch.equal(a, b), (a - b).abs().max()


@pytest.mark.parametrize("name", kernel_cases.OPTIMIZERS)
def test_a_row_does_not_depend_on_the_others(name):
    weight, states, numbers, gradients = kernel_cases.setting(
        name, 128, "cuda", table=5000, used=3000
    )
    ours = kernel_cases.updated(triton_row_updates, name, weight, states, numbers, gradients)
    for few in (1, 3, 40):
        alone = kernel_cases.updated(
            triton_row_updates, name, weight, states, numbers[-few:], gradients[-few:]
        )
        assert all(
            torch.equal(a[numbers[-few:]], b[numbers[-few:]])
            for a, b in zip(ours, alone, strict=True)
        )


def test_nothing_synchronizes_but_the_sizes():
    values = torch.randn(953, 128, device="cuda").requires_grad_()
    index = torch.randint(0, 953, (4000,), device="cuda")
    weight, total = torch.randn(953, 128, device="cuda"), torch.zeros(953, 128, device="cuda")
    edges = torch.tensor([500, 953], device="cuda")
    mode = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # filling memory is no part of it

    def step():
        triton_rows.read_rows(values, index).backward(torch.ones(4000, 128, device="cuda"))
        triton_unique.deduplicate(index, edges)
        triton_unique.collision_masks(index, index[:99])
        numbers, sums = triton_rows.group_duplicates(index)(weight[index % 900])
        triton_row_updates.adagrad(
            weight, total, numbers, triton_row_updates.clip_rows(sums, 1.0), lr=0.1, eps=1e-8
        )

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(mode, warn_only=True)


def test_a_hot_row_does_not_keep_a_program_busy_alone():
    """Half a million tokens of one row: sums in chunks, exact enough, the same every time."""
    torch.manual_seed(0)
    index = torch.cat(
        [torch.zeros(500_000, dtype=torch.int64), torch.randint(1, 1000, (100_000,))]
    )[torch.randperm(600_000)].cuda()
    table, weight = (
        torch.randn(1000, 128, device="cuda").requires_grad_(),
        torch.randn(600_000, 128, device="cuda"),
    )
    grads = [
        torch.autograd.grad(triton_rows.read_rows(table, index), table, weight)[0] for _ in range(3)
    ]
    exact = torch.zeros(1000, 128, dtype=torch.float64, device="cuda").index_add_(
        0, index, weight.double()
    )
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    # each of the hot row's chunks is added in float32: errors grow with the root of their number
    most = 2**-24 * (500_000 / triton_row_sums.CHUNK) ** 0.5
    assert ((grads[0].double() - exact).norm() / exact.norm()).item() < most


def test_tables_of_more_elements_than_32_bits_can_count():
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    torch.use_deterministic_algorithms(False)  # filling memory takes longer than the test
    count, width = 2**24 + 2**22, 128  # 2.7e9 elements
    weight = torch.empty(count, width, device="cuda").normal_()
    numbers = torch.tensor([0, 5, count // 2, 2**24 + 1, count - 1], device="cuda")
    before = weight[numbers]
    assert torch.equal(triton_rows.gather_rows(weight, numbers), before)
    gradients = torch.randn(5, width, device="cuda")
    states = {name: torch.zeros_like(weight) for name in ("first", "second")}
    triton_row_updates.adam(
        weight, *states.values(), numbers, gradients, lr=0.1, betas=(0.9, 0.999), eps=1e-8, step=1
    )
    small = [before.clone(), torch.zeros_like(before), torch.zeros_like(before)]
    row_updates.adam(
        *small,
        torch.arange(5, device="cuda"),
        gradients,
        lr=0.1,
        betas=(0.9, 0.999),
        eps=1e-8,
        step=1,
    )
    for table, expected in zip((weight, *states.values()), small, strict=True):
        torch.testing.assert_close(table[numbers], expected, rtol=2e-6, atol=1e-6)
    assert not states["second"][1:5].any() and not states["second"][6 : count // 2].any()
