"""What all ranks take from rank 0, bit for bit and whatever its dtype: dense parameters and
buffers, and the weights that tables start from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from freescale.packed import view_bytes
from freescale.transport.api import Transport, gather_json

_CHUNK_BYTES = 1 << 26  # of a table's weight, in one message
# by gloo and NCCL
_SUMMED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)


def check_replicable(
    model: nn.Module, tables: Mapping[str, tuple[Tensor, bool]], transport: Transport
) -> None:
    """Raises a ValueError on all ranks alike for a parameter or buffer that cannot be replicated,
    or differs between ranks. A collective. `tables`: by name, the weights that become tables, and
    whether their values are kept; everything else in the model will be replicated."""
    apart = {id(tensor) for tensor, _ in tables.values()}
    mine = [
        [name, f"{_describe_shape(weight)}, {'with' if kept else 'without'} weights", ""]
        for name, (weight, kept) in tables.items()
    ]
    mine += [
        _describe(name, tensor) for name, tensor in _name_tensors(model) if id(tensor) not in apart
    ]
    everybody: list[list[list[str]]] = gather_json(transport, mine)
    for tensors in everybody:
        for name, _, refused in tensors:
            if refused:
                raise ValueError(f"{name} {refused}")
    first = {name: what for name, what, _ in everybody[0]}
    for rank, tensors in enumerate(everybody):
        there = {name: what for name, what, _ in tensors}
        for name in {**first, **there}:
            if first.get(name) != there.get(name):
                ours, theirs = first.get(name, "missing"), there.get(name, "missing")
                raise ValueError(
                    f"ranks have different models: {name} is {ours} on rank 0 and "
                    f"{theirs} on rank {rank}"
                )
        if list(first) != list(there):
            raise ValueError(
                f"ranks have different models: rank {rank} has its parameters in "
                "another order than rank 0"
            )


def copy_from_rank_zero(weights: Iterable[Tensor], transport: Transport) -> None:
    """Overwrites weights [rows, width], on any device, with rank 0's: some rows at a time, since a
    second copy of a table may not fit. A collective."""
    if transport.world == 1:
        return
    for weight in weights:
        rows = max(1, _CHUNK_BYTES // max(1, weight.shape[1] * weight.element_size()))
        for part in torch.split(weight.detach(), rows):
            carried = part.to(transport.device).contiguous()
            transport.broadcast(view_bytes(carried), "dense").wait()
            if transport.rank != 0:
                part.copy_(carried)


def copy_dense_from_rank_zero(model: nn.Module, transport: Transport) -> None:
    """Overwrites dense parameters and buffers of a checked model with rank 0's. A collective."""
    if transport.world == 1:
        return
    for _, tensor in _name_tensors(model):
        value = _drop_repeats(tensor.detach())
        if not value.numel():
            continue
        # Bytes, which are copied and never added: no dtype is too odd for that, and nothing is
        # rounded.
        plain = value.is_contiguous() and not value.is_conj() and not value.is_neg()
        carried = value if plain else value.resolve_conj().resolve_neg().contiguous()
        transport.broadcast(view_bytes(carried), "dense").wait()
        if not plain and transport.rank != 0:
            value.copy_(carried)


def _name_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"dense parameter {name!r}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", buffer


def _drop_repeats(tensor: Tensor) -> Tensor:
    """Each element once: what was expanded has it many times."""
    repeated = [
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return (
        tensor[tuple(slice(0, 1) if many else slice(None) for many in repeated)]
        if any(repeated)
        else tensor
    )


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, or might."""
    reach = 0
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    ):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _describe(name: str, tensor: Tensor) -> list[str]:
    """[name, what it is, why it is refused]."""
    trained = "trained" if tensor.requires_grad else "not trained"
    return [name, f"{_describe_shape(tensor)}, {trained}", _explain_refusal(tensor)]


def _describe_shape(tensor: Tensor) -> str:
    shape = "of no shape yet" if nn.parameter.is_lazy(tensor) else str(list(tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def _explain_refusal(tensor: Tensor) -> str:
    """Why a tensor cannot be replicated; empty if it can."""
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet: call the model with a batch before parallelize"
    if tensor.is_meta:
        return "is on the meta device: build everything but the tables on a real one"
    if type(tensor.data) is not Tensor:
        return f"is a {type(tensor.data).__name__}: give parallelize the plain model"
    if tensor.layout is not torch.strided:
        return f"is stored as {tensor.layout}: keep it dense (.to_dense())"
    if tensor.is_quantized:
        return "is quantized: keep it as numbers (.dequantize())"
    if _overlaps(_drop_repeats(tensor)):
        return "has elements that share memory: keep a copy of it (.clone())"
    if tensor.requires_grad and tensor.dtype not in _SUMMED:
        return (
            f"is trained in {tensor.dtype}, which ranks cannot sum gradients in: use float32 "
            "or bfloat16, or freeze it"
        )
    return ""
