"""Finds the compiled version of a kernel for the values of a launch.

Functions are generated for the types of the values, as dataclasses generate theirs: loops over the
values would take longer than the rest of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

LIMIT = 2**31  # Triton passes smaller integers in 32 bits

Key = tuple[Any, ...]
Compiled = tuple[Any, Any, Any]  # of Triton's compiled kernel: run, function, packed metadata
Fit = Callable[[tuple[Any, ...]], tuple[Any, ...] | None]


class Block:
    """A tensor that a kernel reads by blocks: Triton's TensorDescriptor without its checks. The
    caller guarantees rows at multiples of 16 bytes and a contiguous last axis."""

    __slots__ = ("base", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.padding, self.round_f32_to_tf32 = "zero", False


class LaunchPlan:
    """The compiled versions of a kernel for values of certain types. `build_key(device, options,
    values)` returns (a key that differs between compiled versions, and maybe more often; the values
    to pass to the kernel, with tensors as addresses)."""

    def __init__(self, parameters: Sequence[Any], types: Sequence[type]) -> None:
        self.compiled = dict[Key, Compiled]()
        self._alive = dict[Key, Any]()
        self.build_key = _write_key_function(parameters, types)

    def keep(self, key: Key, compiled: Any) -> None:
        self.compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
        self._alive[key] = compiled  # Triton 3.8 and later unload collected kernels


class Shortcut(NamedTuple):
    """A compiled version of a kernel, for launches with the same constants. `fit(arguments)`
    returns the values to pass, or None if it takes a lookup by the whole key."""

    device: int
    compiled: Compiled
    fit: Fit


def write_fit_function(
    parameters: Sequence[Any], arguments: Sequence[Any], constants: Sequence[Any]
) -> Fit | None:
    """Generates `Shortcut.fit` for launches with `arguments` like these, followed by `constants`.
    None if the version depends on more than types and alignment: on specialised numbers, blocks."""
    names = [f"v{number}" for number in range(len(arguments))]
    aligned, numbers, wrong = list[str](), list[str](), list[str]()
    passed, lines = list[str](), list[str]()
    known: dict[str, Any] = {}
    for name, parameter, value in zip(names, parameters, arguments, strict=False):
        free = parameter.do_not_specialize
        passed.append(name)
        if value is None:
            wrong.append(f"{name} is not None")
        elif isinstance(value, Tensor):
            address = passed[-1] = f"address_{name}"
            lines.append(f"        {address} = {name}.data_ptr()")
            known[f"dtype_{name}"] = value.dtype
            wrong.append(f"{name}.dtype is not dtype_{name}")
            if not free and not parameter.do_not_specialize_on_alignment:
                if value.data_ptr() % 16:
                    wrong.append(f"not {address} & 15")
                else:
                    aligned.append(address)
        elif type(value) is float and not parameter.is_constexpr:
            wrong.append(f"{name}.__class__ is not float")
        elif type(value) is int and free and not parameter.is_constexpr:
            numbers.append(name)
            if not -LIMIT <= value < LIMIT:
                return None
        else:
            return None
    if aligned:
        wrong.append(f"({' | '.join(aligned)}) & 15")
    for number, constant in enumerate(constants):
        known[f"constant_{number}"] = constant
        passed.append(f"constant_{number}")
    if numbers:
        classes = " is ".join(f"{name}.__class__" for name in numbers)
        wrong.append(f"not ({classes} is int)")
        wrong.append(f"min({', '.join(numbers)}, 0) < {-LIMIT}")
        wrong.append(f"max({', '.join(numbers)}, 0) >= {LIMIT}")
    text = [
        "def fit(arguments):",
        "    try:",
        f"        {', '.join(names)}, = arguments",
        *lines,
        "    except (AttributeError, ValueError):",
        "        return None",
        *([f"    if {' or '.join(wrong)}:", "        return None"] if wrong else []),
        f"    return ({', '.join(passed)},)",
    ]
    exec("\n".join(text), known)
    fit: Fit = known["fit"]
    return fit


def _write_key_function(
    parameters: Sequence[Any], types: Sequence[type]
) -> Callable[[int, dict[str, Any], Sequence[Any]], tuple[Key, Sequence[Any]]]:
    """Generates `LaunchPlan.build_key` for values of these types."""
    names = [f"v{number}" for number in range(len(types))]
    lines = [f"    {', '.join(names)}, = values"]
    key, passed = ["device", "*options.items()"], list(names)
    for number, (name, parameter, kind) in enumerate(zip(names, parameters, types, strict=True)):
        free = parameter.do_not_specialize
        if parameter.is_constexpr:
            key.append(name)
        elif issubclass(kind, Tensor):
            address = passed[number] = f"address{number}"
            lines.append(f"    {address} = {name}.data_ptr()")
            key.append(f"{name}.dtype")
            if not free and not parameter.do_not_specialize_on_alignment:
                key.append(f"{address} % 16 == 0")
        elif issubclass(kind, Block):
            key += [f"{name}.base.dtype", f"*{name}.block_shape"]
        elif kind is not type(None) and not issubclass(kind, float):  # an int
            key.append(f"{-LIMIT} <= {name} < {LIMIT}" if free else name)
    lines.append(f"    return ({', '.join(key)},), ({', '.join(passed)},)")
    written: dict[str, Any] = {}
    exec("\n".join(["def build_key(device, options, values):", *lines]), written)
    build_key: Callable[..., tuple[Key, Sequence[Any]]] = written["build_key"]
    return build_key
