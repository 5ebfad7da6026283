"""Moves of whole samples of jagged features as one Triton kernel: the twin of `jagged.move`, for
NVIDIA GPUs.

Plans are those of `jagged`. All tensors of a move are read in place and written by one launch,
forward and backward; nothing synchronizes. The results are parts of one allocation, each at a
multiple of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from freescale.kernels.jit.launch import count_blocks, require_gpu, use_device
from freescale.kernels.upload import upload
from freescale_bench.kernels.jagged import Move, check_values

# Words that a program copies. Of 8 bytes, with 4 warps, they are 64 bytes a thread, four loads of
# 16 in flight; and a batch of ids as small as 4 MB still gives each multiprocessor of an H200 four
# programs.
TILE = 1024
WARPS = 4
MAX_UNIT = 64  # words: a unit is at most one row of a tile
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_ALIGNMENT = 16  # elements, hence at least as many bytes, between two results


def move(values: Sequence[Tensor], plan: Move) -> list[Tensor]:
    """The tensors of the plan's source -> those of its target. Differentiable; one dtype, of up to
    8 bytes."""
    check_values(values, plan)
    if values[0].dtype.itemsize not in WORDS:
        raise ValueError(
            f"elements of up to 8 bytes can be moved, not {values[0].dtype}; use bench.jagged"
        )
    require_gpu(values[0].device, "bench.jagged")
    if values[0].is_floating_point():
        return list(_Moved.apply(plan, *values))  # type: ignore[no-untyped-call]
    return _launch(values, plan)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, *values):  # type: ignore[no-untyped-def]
        ctx.plan = plan
        return tuple(_launch(values, plan))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        return None, *_launch(grads, ctx.plan.inverse)


def _launch(values: Sequence[Tensor], plan: Move) -> list[Tensor]:
    values = [value.contiguous() for value in values]
    device, dtype = values[0].device, values[0].dtype
    starts, size = _places(plan.target.sizes)
    pointers = [value.data_ptr() for value in values]
    # Words of the largest size that units consist of and that addresses are multiples of.
    word = math.gcd(plan.unit * dtype.itemsize, 8, *pointers)
    flat = torch.empty(size * dtype.itemsize // word, dtype=WORDS[word], device=device)
    if len(plan.lengths):
        from freescale_bench.kernels.triton_jagged_kernels import move_kernel

        words = plan.unit * dtype.itemsize // word
        unit = math.gcd(words, MAX_UNIT)
        each = TILE // unit
        runs = _runs(plan, starts, device)
        # a whole number: results start at multiples of 16 elements, and of a unit if that is larger
        units = flat.numel() // unit
        single = len(pointers) == 1
        source = pointers[0] if single else upload(np.array(pointers, np.int64), device)
        with use_device(device):
            move_kernel[(count_blocks(units, each),)](
                flat, source, runs, runs.shape[1], runs.shape[1].bit_length(), units,
                SINGLE=single, ITEM=dtype.itemsize, UNIT=unit, UNITS=each,
                ALIGNED=math.gcd(unit * word, *pointers) % 16 == 0, num_warps=WARPS,
            )  # fmt: skip
    flat = flat.view(dtype)
    parts = zip(starts, plan.target.sizes, plan.target.rows, plan.target.shapes, strict=True)
    return [flat[start : start + length].view(rows, *shape) for start, length, rows, shape in parts]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """First element of each result in their allocation, and the size of that."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += count_blocks(size, _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _runs(plan: Move, starts: list[int], device: torch.device) -> Tensor:
    """[4, runs] int64, made once per plan and device."""
    if ("runs", device) not in plan.kept:
        put = np.array(starts, np.int64)[plan.put[:, 0]] + plan.put[:, 1]
        table = np.stack([put, put + plan.lengths, plan.taken[:, 1], plan.taken[:, 0]])
        plan.kept["runs", device] = upload(table, device)
    runs: Tensor = plan.kept["runs", device]
    return runs
