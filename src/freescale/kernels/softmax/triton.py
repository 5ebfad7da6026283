"""The sampled softmax as Triton kernels, for NVIDIA GPUs.

Forward is one kernel and keeps four numbers per token. Backward computes the scores again. One
kernel computes the gradients of outputs and another those of negatives (per position, one kernel
does both); then a sort of the indices brings the entries of each row together to be summed. Nothing
is read from the device, and there are no atomics: the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.kernels.attention.checks import check_same_device
from freescale.kernels.attention.triton_launch import FLOAT32_PRECISION
from freescale.kernels.jit.launch import (
    KernelModule,
    count_blocks,
    is_interpreted,
    launch_kernel,
    require_gpu,
    round_up_to_power_of_two,
    use_device,
)
from freescale.kernels.softmax.reference import Negatives, check_inputs

MAX_WIDTH = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIMIT = 2**31 - 1
_kernels = KernelModule("freescale.kernels.softmax.triton_kernels")


@dataclass(frozen=True)
class SoftmaxLaunch:
    """The tile sizes of the kernels that multiply matrices."""

    tokens: int  # M of a tile
    negatives: int  # N of a tile, at most
    columns: int  # W of one turn of the loop over the width, at most
    sum_negatives: int  # N in the kernel of the negatives' gradients, at most
    sum_columns: int  # V of its sums, at most
    warps: tuple[int, int, int]  # forward, gradients of outputs, of negatives


NARROW = SoftmaxLaunch(64, 128, 64, 64, 256, (4, 8, 8))
# float32 operands are split into three bfloat16 each, which takes registers
FLOAT32 = SoftmaxLaunch(64, 128, 32, 64, 64, (8, 8, 8))
SAMPLE_BLOCK = 256  # lengths that a program adds up at a time to find its sample
POSITION_ELEMENTS = 4096  # of a tile of gathered rows
ENTRY_ELEMENTS, ENTRY_CHUNK = 2048, 128
SEARCH_BLOCK = 256
# A sample's tokens are cut into chunks, each with its own sums for the negatives. Chunks are as
# long as possible, with some programs for every multiprocessor.
SHORTEST_CHUNK, LONGEST_CHUNK, PROGRAMS = 256, 4096, 528


def sampled_softmax(
    outputs: Tensor, rows: Tensor, targets: Tensor, negatives: Negatives, lengths: Tensor, *,
    temperature: float, normalize: bool, dtype: torch.dtype | None = None,
    host_lengths: Tensor | None = None, weights: Tensor | None = None,
    targets_log_q: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As the reference, in float32. Products of float32 operands are exact to 24 bits.

    `dtype`: of the products' operands; None: that of the outputs.
    """
    check_inputs(outputs, rows, targets, negatives, lengths, weights, targets_log_q)
    dtype = dtype or outputs.dtype
    for name, kind in (("outputs", outputs.dtype), ("rows", rows.dtype), ("products", dtype)):
        if kind not in DTYPES:
            raise ValueError(
                f"{name} must be {' or '.join(map(str, DTYPES))}, not {kind}; "
                "use kernels.softmax.reference"
            )
    if outputs.shape[1] > MAX_WIDTH or rows.shape[0] > _LIMIT:
        raise ValueError(
            f"the kernels are for fewer than 2^31 rows up to {MAX_WIDTH} wide, not "
            f"{list(rows.shape)}"
        )
    optional = {"weights": weights, "log_q": negatives.log_q, "targets_log_q": targets_log_q}
    check_same_device(
        outputs=outputs, rows=rows, targets=targets, negatives=negatives.index, lengths=lengths,
        **{name: tensor for name, tensor in optional.items() if tensor is not None},
    )  # fmt: skip
    require_gpu(outputs.device, "kernels.softmax.reference")
    weights, log_q, targets_log_q = (
        None if column is None else column.contiguous() for column in optional.values()
    )
    index = negatives.index.contiguous()
    # If the batch shares its negatives, all tokens are one sample.
    samples, longest = 1, targets.numel()
    if negatives.per == "sample":
        host = lengths.cpu() if host_lengths is None else host_lengths
        samples, longest = host.numel(), int(host.max())
    call = _Call(
        targets.contiguous(), Negatives(index, negatives.per, log_q), lengths.contiguous(),
        samples, longest, weights, targets_log_q, 1 / temperature, normalize, dtype,
    )  # fmt: skip
    total: Tensor = _SampledSoftmax.apply(outputs, rows, call)  # type: ignore[no-untyped-call]
    return total


@dataclass(frozen=True)
class _Call:
    """The common arguments of the launches for one loss."""

    targets: Tensor
    negatives: Negatives
    lengths: Tensor
    samples: int
    longest: int  # tokens of a sample
    weights: Tensor | None
    targets_log_q: Tensor | None
    inverse_temperature: float
    normalize: bool
    dtype: torch.dtype  # of the products' operands

    @property
    def tokens(self) -> int:
        return self.targets.numel()

    @property
    def launch(self) -> SoftmaxLaunch:
        return FLOAT32 if self.dtype == torch.float32 else NARROW

    # ---- sizes

    def _describe_columns(self, width: int) -> dict[str, Any]:
        """The options of kernels that read whole rows."""
        return {"WIDTH": width, "W": round_up_to_power_of_two(width), "num_warps": 4}

    def _describe_positions(self, width: int) -> dict[str, Any]:
        count, columns = self.negatives.count, self._describe_columns(width)
        most = max(1, POSITION_ELEMENTS // columns["W"])
        fewer = {"N": min(most, round_up_to_power_of_two(count)), "K": count}
        return columns | fewer | {"NORMALIZE": self.normalize}

    def _describe_products(self, width: int, most_negatives: int, warps: int) -> dict[str, Any]:
        import triton.language as tl

        kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        exact = self.dtype == torch.float32 and not is_interpreted()
        return {
            "SHARED": self.negatives.per == "batch",
            "NORMALIZE": self.normalize,
            "K": self.negatives.count,
            "WIDTH": width,
            "M": self.launch.tokens,
            "N": _fit(self.negatives.count, most_negatives),
            "W": _fit(width, self.launch.columns),
            "BLOCK": SAMPLE_BLOCK,
            "DTYPE": kinds[self.dtype],
            "PRECISION": FLOAT32_PRECISION if exact else "ieee",  # only for float32 operands
            "num_warps": warps,
        }

    def _count_tiles(self) -> tuple[int, int]:
        """(programs, tiles of the longest sample). Every sample has this number of programs; those
        behind its end do nothing. A power of two: batches of similar lengths launch the same."""
        tiles = round_up_to_power_of_two(count_blocks(self.longest, self.launch.tokens))
        return self.samples * tiles, tiles

    # ---- launches

    def forward(self, outputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(losses [tokens], values of each token for backward)."""
        width, device = outputs.shape[1], outputs.device
        losses = torch.empty(self.tokens, dtype=torch.float32, device=device)
        kept = torch.empty(self.tokens, 4, dtype=torch.float32, device=device)
        inputs = (outputs, rows, self.targets, self.negatives.index, self.negatives.log_q,
                  self.targets_log_q, self.weights)  # fmt: skip
        if self.negatives.per == "position":
            launch_kernel(
                _kernels.position_forward_kernel, (self.tokens,), *inputs, losses, kept,
                self.inverse_temperature, **self._describe_positions(width),
            )  # fmt: skip
        else:
            programs, tiles = self._count_tiles()
            launch_kernel(
                _kernels.forward_kernel, (programs,), *inputs, self.lengths, losses, kept,
                self.tokens, tiles, self.inverse_temperature,
                **self._describe_products(width, self.launch.negatives, self.launch.warps[0]),
            )  # fmt: skip
        return losses, kept

    def backward(
        self, grad: Tensor, outputs: Tensor, rows: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of outputs and rows."""
        grad_outputs = torch.empty_like(outputs)
        inputs = (grad, outputs, rows, self.targets, self.negatives.index, self.negatives.log_q,
                  self.weights)  # fmt: skip
        if self.negatives.per == "position":
            entries = self._differentiate_positions(inputs, kept, grad_outputs)
        else:
            entries = self._differentiate_products(inputs, kept, grad_outputs)
        return grad_outputs, self._sum_entries(outputs, rows, *entries)

    def _differentiate_positions(
        self, inputs: tuple[Any, ...], kept: Tensor, grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Writes the gradient of outputs; returns the entries of rows: (keys, coefficients, no
        sums)."""
        entries, device = self.tokens * (self.negatives.count + 1), kept.device
        _check_entries(entries)
        keys = torch.empty(entries, dtype=torch.int32, device=device)
        coefficients = torch.empty(entries, dtype=torch.float32, device=device)
        launch_kernel(
            _kernels.position_backward_kernel, (self.tokens,), *inputs, kept, grad_outputs,
            coefficients, keys, self.inverse_temperature,
            **self._describe_positions(grad_outputs.shape[1]),
        )  # fmt: skip
        return keys, coefficients, None

    def _differentiate_products(
        self, inputs: tuple[Any, ...], kept: Tensor, grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Writes the gradient of outputs; returns the entries of rows: (keys, coefficients of the
        targets, sums of the negatives)."""
        count, (tokens, width), device = self.negatives.count, grad_outputs.shape, kept.device
        launch = self.launch
        shape = self._describe_products(width, launch.negatives, launch.warps[1])
        sums_shape = self._describe_products(width, launch.sum_negatives, launch.warps[2])
        sums_shape["V"] = columns = _fit(width, launch.sum_columns)
        parts = count_blocks(count, sums_shape["N"]) * count_blocks(width, columns)
        chunk = choose_chunk(tokens, parts)
        # The most for a batch of this size, whatever its lengths.
        entries = tokens + (tokens // chunk + self.samples) * count
        _check_entries(entries)
        keys = torch.full((entries,), _LIMIT, dtype=torch.int32, device=device)
        coefficients = torch.empty(tokens, dtype=torch.float32, device=device)
        sums = torch.empty(entries - tokens, width, dtype=torch.float32, device=device)
        partial = None
        if count > shape["N"]:  # more than one tile of negatives
            partial = torch.empty(tokens, width, dtype=torch.float32, device=device)
        programs, tiles = self._count_tiles()
        launch_kernel(
            _kernels.outputs_kernel, (programs,), *inputs, self.lengths, kept, grad_outputs,
            partial, coefficients, keys, tokens, tiles, self.inverse_temperature, **shape,
        )  # fmt: skip
        most = round_up_to_power_of_two(count_blocks(self.longest, chunk))
        launch_kernel(
            _kernels.negatives_kernel, (self.samples * most, parts), *inputs, self.lengths, kept,
            sums, keys, tokens, most, chunk, self.inverse_temperature, **sums_shape,
        )  # fmt: skip
        return keys, coefficients, sums

    def _sum_entries(
        self, outputs: Tensor, rows: Tensor, keys: Tensor, coefficients: Tensor, sums: Tensor | None
    ) -> Tensor:
        """The gradient of rows."""
        entries, count, device = keys.numel(), rows.shape[0], rows.device
        shape = self._describe_columns(outputs.shape[1])
        shape |= {
            "E": max(1, min(ENTRY_CHUNK, ENTRY_ELEMENTS // shape["W"])),
            "PER": 1 if sums is not None else self.negatives.count + 1,
            "CHUNK": ENTRY_CHUNK,
        }
        weighted = coefficients.numel()
        ordered, order = keys.sort(stable=True)
        starts = torch.empty(count + 1, dtype=torch.int32, device=device)
        launch_kernel(
            _kernels.starts_kernel, (count_blocks(count + 1, SEARCH_BLOCK),), ordered, starts,
            entries, count, entries.bit_length() + 1, BLOCK=SEARCH_BLOCK, num_warps=4,
        )  # fmt: skip
        chunks = entries // ENTRY_CHUNK
        partial = torch.empty(max(1, chunks), outputs.shape[1], dtype=torch.float32, device=device)
        if chunks:
            launch_kernel(
                _kernels.chunks_kernel, (chunks,), ordered, order, coefficients, outputs, sums,
                partial, weighted, **shape,
            )  # fmt: skip
        grad_rows = torch.empty_like(rows)
        launch_kernel(
            _kernels.rows_kernel, (count,), rows, order, starts, coefficients, outputs, sums,
            partial, grad_rows, weighted, NORMALIZE=self.normalize, **shape,
        )  # fmt: skip
        return grad_rows


def _fit(size: int, most: int) -> int:
    """The power of two that holds `size`, up to `most`, and 16 for tensor cores."""
    return max(16, min(most, round_up_to_power_of_two(size)))


def choose_chunk(tokens: int, parts: int) -> int:
    """How many tokens of a sample share sums for the negatives, if `parts` programs compute the
    negatives and columns of a chunk."""
    chunk = LONGEST_CHUNK
    while chunk > SHORTEST_CHUNK and tokens // chunk * parts < PROGRAMS:
        chunk //= 2
    return chunk


def _check_entries(entries: int) -> None:
    if entries > _LIMIT:
        raise ValueError(
            f"a batch may have up to 2^31 targets and negatives, not {entries}: use fewer "
            "negatives or a smaller batch"
        )


class _SampledSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, rows, call):  # type: ignore[no-untyped-def]
        ctx.call = call
        ctx.empty = not call.tokens
        if ctx.empty:
            ctx.save_for_backward(outputs, rows)
            return torch.zeros((), dtype=torch.float32, device=outputs.device)
        outputs, rows = outputs.contiguous(), rows.contiguous()
        with use_device(outputs.device):
            losses, kept = call.forward(outputs, rows)
        ctx.save_for_backward(outputs, rows, kept)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if ctx.empty:
            return *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors), None
        outputs, rows, kept = ctx.saved_tensors
        with use_device(outputs.device):
            return *ctx.call.backward(grad.contiguous(), outputs, rows, kept), None
