"""What is not a table is the same on every rank: dense parameters and buffers, rank 0's bit for
bit, whatever their dtype."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from freescale.transport.api import Transport

# by gloo and NCCL
_SUMMED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)


def refuse(model: nn.Module, sharded: Iterable[Tensor], transport: Transport) -> None:
    """By name, and on all ranks alike, what cannot be replicated; `sharded` becomes tables. A
    collective."""
    apart = {id(tensor) for tensor in sharded}
    mine = [_told(name, tensor) for name, tensor in _named(model) if id(tensor) not in apart]
    everybody: list[list[list[str]]] = [
        json.loads(told) for told in transport.gather_bytes(json.dumps(mine).encode())
    ]
    for told in everybody:
        for name, _, refused in told:
            if refused:
                raise ValueError(f"{name} {refused}")
    first = {name: what for name, what, _ in everybody[0]}
    for rank, told in enumerate(everybody):
        there = {name: what for name, what, _ in told}
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


def take_from_rank_zero(model: nn.Module, transport: Transport) -> None:
    """Of a model that was not refused. A collective."""
    if transport.world == 1:
        return
    for _, tensor in _named(model):
        value = _once(tensor.detach())
        if not value.numel():
            continue
        # Bytes, which are copied and never added: no dtype is too odd for that, and nothing is
        # rounded.
        plain = value.is_contiguous() and not value.is_conj() and not value.is_neg()
        carried = value if plain else value.resolve_conj().resolve_neg().contiguous()
        # view(-1) may keep a stride that a single element has
        flat = carried.as_strided((carried.numel(),), (1,))
        transport.broadcast(flat.view(torch.uint8), "dense").wait()
        if not plain and transport.rank != 0:
            value.copy_(carried)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"dense parameter {name!r}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", buffer


def _once(tensor: Tensor) -> Tensor:
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


def _told(name: str, tensor: Tensor) -> list[str]:
    """[name, what it is, why it is refused]."""
    shape = "of no shape yet" if nn.parameter.is_lazy(tensor) else str(list(tensor.shape))
    what = (
        f"{str(tensor.dtype).removeprefix('torch.')} {shape}, "
        f"{'trained' if tensor.requires_grad else 'not trained'}"
    )
    return [name, what, _refused(tensor)]


def _refused(tensor: Tensor) -> str:
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
    if _overlaps(_once(tensor)):
        return "has elements that share memory: keep a copy of it (.clone())"
    if tensor.requires_grad and tensor.dtype not in _SUMMED:
        return (
            f"is trained in {tensor.dtype}, which ranks cannot sum gradients in: use float32 "
            "or bfloat16, or freeze it"
        )
    return ""
