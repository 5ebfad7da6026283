"""What `freescale doctor` says of kernels is what `kernels.dispatch` does, and of torch what
pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from freescale.cli.doctor import TESTED_TORCH, _check_kernels, examine
from freescale.kernels.attention.reference import AttentionPlan
from freescale.kernels.dispatch.attention import fits_triton_attention, plan_attention
from freescale.kernels.dispatch.versions import has_triton


@pytest.mark.parametrize("triton", [None, "3.6.0"])
@pytest.mark.parametrize("gpu", [False, True])
def test_the_kernels_that_doctor_names_are_those_that_run(gpu, triton):
    _, found, says = _check_kernels(gpu, triton)
    default = fits_triton_attention(gpu, triton is not None, (32, 32), torch.float32)
    assert found == (triton or "no")
    assert ("Triton kernels run" in says) == default and ("plain torch kernels run" in says) == (
        not default
    )


def test_the_head_widths_that_doctor_names_are_the_widest_of_the_rule():
    named = [int(number) for number in re.findall(r"\b\d+", _check_kernels(True, "3.6.0")[2])]

    def fits(dtype):
        return [w for w in range(1, 513) if fits_triton_attention(True, True, (w, w), dtype)]

    widths = zip(named, (torch.bfloat16, torch.float32), strict=True)
    assert all(fits(dtype) == list(range(1, widest + 1)) for widest, dtype in widths)
    assert not fits_triton_attention(True, True, (32, 257), torch.bfloat16)
    assert not fits_triton_attention(True, True, (32, 32), torch.float64)


def test_doctor_speaks_of_this_machine():
    (row,) = [row for row in examine() if row[0] == "triton"]
    assert (row[1] != "no") == has_triton()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = plan_attention(
        torch.tensor([3, 5], device=device), 2, widths=(32, 32), dtype=torch.float32
    )
    assert ("plain torch kernels run" in row[2]) == isinstance(plan, AttentionPlan)
    assert ("Triton kernels run" in row[2]) == (not isinstance(plan, AttentionPlan))


def test_the_versions_of_torch_that_doctor_accepts_are_those_that_pip_installs():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    first, last = TESTED_TORCH
    bound = f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert bound in project["dependencies"]
