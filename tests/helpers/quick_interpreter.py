"""Triton's interpreter with less to do between two operations of numpy, where it spends most of its
time; it computes and checks the same. As a program: `FILE ARGUMENTS...` with it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    """The interpreter puts its own functions in the place of the language's at every launch and at
    every call of a jitted function, tl.sum among them. Here they stay once they are there."""
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Callable) -> SimpleNamespace:
        seen = {id(value) for value in function.__globals__.values() if value in (tl, tl.core)}
        if not seen <= patched:
            patch(function)
            patched.update(seen)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


def remember_types() -> None:
    """Every result of an operation makes a block type, looks up numpy's, and wraps its shape in
    constants; there are few different ones."""
    find, found = interpreter._get_np_dtype, {}

    def find_numpy_type(kind: tl.dtype) -> np.dtype:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    make, made = tl.block_type.__init__, {}

    def make_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence) -> None:
        sizes = tuple(size if type(size) is int else size.value for size in shape)
        if (element_ty.name, sizes) not in made:
            make(self, element_ty, shape)
            constants = [tl.constexpr(size) for size in self.shape]
            self.of_tensors = tl.constexpr(self.numel), tl.tuple(constants)
            made[element_ty.name, sizes] = self.__dict__
        self.__dict__ = made[element_ty.name, sizes]

    def make_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_scalars

    of_scalars = tl.constexpr(1), tl.tuple([])
    interpreter._get_np_dtype = find_numpy_type
    tl.block_type.__init__ = make_block_type
    tl.tensor.__init__ = make_tensor


def broadcast_different_shapes_alone() -> None:
    """Most operands have one shape already, which the language finds out axis by axis."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_values(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if all(blocks) and lhs.type.shape.values == rhs.type.shape.values or not any(blocks):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_values


def skip_overflow_checks() -> None:
    """Six operations for each sum of integers, whose result the interpreter asserts only where
    debugging is switched on."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def keep_masks_boolean() -> None:
    """Triton 3.9 refuses masks that are not boolean, and makes such a mask itself: spread over a
    block, a comparison of two scalars gets their type."""
    builder = type(interpreter.interpreter_builder)
    splat = builder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        boolean = value.data.dtype == np.bool_
        return splat(self, kind, replace(value, dtype=tl.int1) if boolean else value)

    builder.create_splat = create_splat


if __name__ == "__main__":
    patch_language_once()
    keep_masks_boolean()
    remember_types()
    broadcast_different_shapes_alone()
    skip_overflow_checks()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
