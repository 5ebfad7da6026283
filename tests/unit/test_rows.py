"""Row optimizers against torch.optim on a dense parameter, and the sum of duplicates against a
loop."""

from __future__ import annotations

import pytest
import torch

from freescale.embedding.optimizers import (
    ROW_OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    CountedAdam,
    RowWiseAdagrad,
)
from freescale.kernels.row_updates import reference as row_updates
from freescale.kernels.rows import reference as kernels

torch_twins = [
    (SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    (Adagrad(lr=0.3, eps=1e-6), lambda p: torch.optim.Adagrad(p, lr=0.3, eps=1e-6)),
    (Adam(lr=0.3, betas=(0.8, 0.95)), lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.8, 0.95))),
]


@pytest.mark.parametrize(("ours", "twin"), torch_twins, ids=lambda v: getattr(v, "name", ""))
@pytest.mark.parametrize("block_bytes", [64, 1 << 19])
def test_equals_torch_where_all_rows_are_read(ours, twin, block_bytes, monkeypatch):
    monkeypatch.setattr(row_updates, "_BLOCK_BYTES", block_bytes)  # many blocks, or one
    torch.manual_seed(0)
    weight = torch.randn(9, 4, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = twin([parameter])
    state = {
        name: torch.zeros(9, *shape, dtype=torch.float64)
        for name, shape in ours.state_shapes(4).items()
    }
    for step in range(1, 6):
        gradient = torch.randn(9, 4, dtype=torch.float64)
        order = torch.randperm(9)
        ours.update(weight, state, order, gradient[order], step=step, factor=1.0)
        parameter.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_rowwise_adagrad_against_its_formula():
    torch.manual_seed(0)
    weight, total = torch.randn(6, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    expected, sums = weight.clone(), [0.0] * 6
    for rows in ([0, 3, 5], [3], [5, 1]):
        gradient = torch.randn(len(rows), 4, dtype=torch.float64)
        for row, g in zip(rows, gradient):
            sums[row] += float((g * g).mean())
            expected[row] -= 0.5 * g / (sums[row] ** 0.5 + 1e-3)
        RowWiseAdagrad(lr=0.25, eps=1e-3).update(
            weight, {"sum": total}, torch.tensor(rows), gradient, step=1, factor=2.0
        )
    torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


def test_counted_adam_is_adam_of_each_row_alone():
    """Rows are updated in some steps, each by torch's optimizer of its own; -1 is no row, and
    what its gradient holds means nothing."""
    torch.manual_seed(0)
    weight = torch.randn(5, 4, dtype=torch.float64)
    alone = [torch.nn.Parameter(row.clone()) for row in weight]
    twins = [torch.optim.Adam([row], lr=0.3, betas=(0.8, 0.95)) for row in alone]
    ours = CountedAdam(lr=0.15, betas=(0.8, 0.95))
    shapes = ours.state_shapes(4).items()
    state = {name: torch.zeros(5, *shape, dtype=torch.float64) for name, shape in shapes}
    for step, rows in enumerate(([0, 3], [3, -1], [-1, 4, 0, -1, 3], [1], [0, 1]), start=7):
        gradient = torch.randn(len(rows), 4, dtype=torch.float64)
        gradient[torch.tensor(rows) < 0] = torch.nan
        ours.update(weight, state, torch.tensor(rows), gradient, step=step, factor=2.0)
        for row, grad in zip(rows, gradient):
            if row >= 0:
                alone[row].grad = grad.clone()
                twins[row].step()
        expected = torch.stack([row.detach() for row in alone])
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


def test_sum_of_duplicates_is_in_order_and_independent_of_other_rows():
    torch.manual_seed(0)
    rows = torch.randint(0, 50, (400,))
    gradients = torch.randn(400, 8) * torch.logspace(-6, 6, 400)[:, None]
    unique, sums = kernels.group_duplicates(rows)(gradients)
    for row, total in zip(unique.tolist(), sums):
        mine = gradients[rows == row]
        expected = mine[0].clone()
        for gradient in mine[1:]:
            expected += gradient
        assert torch.equal(total, expected)
    few = rows < 10
    unique_few, sums_few = kernels.group_duplicates(rows[few])(gradients[few])
    assert torch.equal(sums_few, sums[: unique_few.numel()])
    order = torch.randperm(30)
    unique, sums = kernels.group_duplicates(order)(gradients[:30])
    assert torch.equal(unique, torch.arange(30)) and torch.equal(sums[order], gradients[:30])


def test_rows_are_clipped_one_by_one():
    clipped = row_updates.clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]), 1.0)
    torch.testing.assert_close(clipped, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_negative_learning_rate_is_refused():
    with pytest.raises(ValueError, match="Adam: lr must not be negative, got -1"):
        Adam(lr=-1)


@pytest.mark.parametrize("width", [1, 3, 7, 8, 33, 128])
@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_a_row_does_not_depend_on_the_others_of_the_call(name, width):
    """The staged schedule updates the rows of a step in two calls: float32 bits must be those of
    one call, clipping included."""
    generator = torch.Generator().manual_seed(width)
    rows, steps = 700, 3
    split = torch.rand(rows, generator=generator) < 0.1
    results = []
    for parts in (
        [torch.arange(rows)],
        [split.nonzero().squeeze(1), (~split).nonzero().squeeze(1)],
    ):
        generator.manual_seed(width + 1)
        optimizer = ROW_OPTIMIZERS[name](lr=0.3)
        weight = torch.randn(rows, width, generator=generator)
        state = {
            key: torch.zeros(rows, *shape) for key, shape in optimizer.state_shapes(width).items()
        }
        for step in range(1, steps + 1):
            gradients = torch.randn(rows, width, generator=generator)
            for part in parts:
                clipped = row_updates.clip_rows(gradients.index_select(0, part), 0.7 * width**0.5)
                optimizer.update(weight, state, part, clipped, step=step, factor=0.5)
        results.append([weight, *state.values()])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.view(torch.int32), two.view(torch.int32))
