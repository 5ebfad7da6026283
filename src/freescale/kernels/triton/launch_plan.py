"""What tells the compiled versions of a kernel apart, for values of certain types: found once for
the types, so that little is left to do at each launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

LIMIT = 2**31  # of integers that Triton passes in 32 bits

Key = tuple[Any, ...]


class Block:
    """A tensor that a kernel reads by blocks through a descriptor.

    Has the fields of Triton's TensorDescriptor, without the checks that this makes each time: the
    caller vouches for rows at multiples of 16 bytes and a last axis in one piece.
    """

    __slots__ = ("base", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.padding, self.round_f32_to_tf32 = "zero", False


class LaunchPlan:
    """The compiled versions of a kernel for values of certain types.

    `build_key(device, options, values)` returns (a key that differs wherever Triton compiles
    differently, and maybe in more; the values as they are handed over: tensors as addresses).
    """

    def __init__(self, parameters: Sequence[Any], types: Sequence[type]) -> None:
        self.compiled = dict[Key, tuple[Any, Any, Any]]()
        self.build_key = _write_key_function(parameters, types)

    def keep(self, key: Key, compiled: Any) -> None:
        self.compiled[key] = compiled.run, compiled.function, compiled.packed_metadata


def _write_key_function(
    parameters: Sequence[Any], types: Sequence[type]
) -> Callable[[int, dict[str, Any], Sequence[Any]], tuple[Key, Sequence[Any]]]:
    """Written out for these types, as dataclasses are: loops over the values would take longer than
    all else that a launch does."""
    names = [f"v{number}" for number in range(len(types))]
    lines = [f"    {', '.join(names)}, = values"]
    key, handed = ["device", "*options.items()"], list(names)
    for number, (name, parameter, kind) in enumerate(zip(names, parameters, types, strict=True)):
        free = parameter.do_not_specialize
        if parameter.is_constexpr:
            key.append(name)
        elif issubclass(kind, Tensor):
            address = handed[number] = f"address{number}"
            lines.append(f"    {address} = {name}.data_ptr()")
            key.append(f"{name}.dtype")
            if not free and not parameter.do_not_specialize_on_alignment:
                key.append(f"{address} % 16 == 0")
        elif issubclass(kind, Block):
            key += [f"{name}.base.dtype", f"*{name}.block_shape"]
        elif kind is not type(None) and not issubclass(kind, float):  # an int
            key.append(f"{-LIMIT} <= {name} < {LIMIT}" if free else name)
    lines.append(f"    return ({', '.join(key)},), ({', '.join(handed)},)")
    written: dict[str, Any] = {}
    exec("\n".join(["def build_key(device, options, values):", *lines]), written)
    build_key: Callable[..., tuple[Key, Sequence[Any]]] = written["build_key"]
    return build_key
