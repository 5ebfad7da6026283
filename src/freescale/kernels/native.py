"""The functions of csrc/, as Python calls them; and whether this process has them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.compiled import compile_and_load

SOURCE = Path(__file__).with_name("csrc") / "native.c"
# Compiled for the processor that it runs on. Sums are vectorised where the source says so.
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-pthread",
    "-shared",
    "-fPIC",
)


class Shape(Structure):
    """`Shape` of layer.h."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "width", "heads", "d_qk", "d_v", "pairs")),
        *((name, c_int64) for name in ("distances", "buckets")),
        *((name, c_void_p) for name in ("query", "key", "distance", "bucket", "token_keys")),
        ("threshold", c_int32),
        *((name, c_float) for name in ("keep_scale", "alpha", "scale", "eps")),
    ]


class NativeLibrary:
    """The compiled kernels. A call releases Python's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        if not _declare(library.adopt_sgemm, c_void_p, returns=c_int32)(_find_sgemm()):
            raise OSError("the matrix product of torch's BLAS is not as expected")
        shape, size, at, flag = POINTER(Shape), c_int64, c_void_p, c_int32
        self.add_positions = _declare(
            library.add_positions, *[size] * 3, *[at] * 5, c_float, c_int32, c_float, *[at] * 4
        )
        self.differentiate_positions = _declare(
            library.differentiate_positions, *[size] * 2, *[at] * 3, c_float, *[at] * 2
        )
        self.measure_samples = _declare(library.measure_samples, size, *[at] * 3, returns=c_int32)
        self.list_pairs = _declare(
            library.list_pairs, size, *[at] * 3, c_double, c_int32, *[at] * 4
        )
        self.count_room = _declare(library.count_room, shape, size, *[at] * 2)
        self.run_layers = _declare(library.run_layers, shape, size, *[at] * 4)
        self.differentiate_layers = _declare(library.differentiate_layers, shape, size, *[at] * 6)
        self.count_softmax_room = _declare(
            library.count_softmax_room, *[size] * 4, at, returns=size
        )
        self.sampled_softmax = _declare(
            library.sampled_softmax, *[size] * 5, *[at] * 8, c_float, flag, *[at] * 4
        )
        self.gather_units = _declare(library.gather_units, *[size] * 2, *[at] * 2, flag, *[at] * 2)
        self.compare_at_positions = _declare(
            library.compare_at_positions, *[size] * 3, *[at] * 8, c_float, flag, *[at] * 4
        )
        self.pass_norms = _declare(library.pass_norms, *[size] * 2, *[at] * 2, flag, at)
        self.adam_rows = _declare(library.adam_rows, *[size] * 2, *[at] * 5, *[c_float] * 6, size)
        self.adam_tensors = _declare(
            library.adam_tensors, size, *[at] * 6, *[c_float] * 8, size, returns=flag
        )
        self.rowwise_adagrad_rows = _declare(
            library.rowwise_adagrad_rows, *[size] * 2, *[at] * 4, *[c_float] * 2, size
        )
        self.deduplicate_keys = _declare(
            library.deduplicate_keys, size, at, size, *[at] * 5, returns=c_int64
        )
        self.mark_shared_rows = _declare(
            library.mark_shared_rows, *[size, at] * 2, *[at] * 2, returns=c_int32
        )
        self.divide_marked_rows = _declare(
            library.divide_marked_rows, size, *[at] * 3, size, *[at] * 3
        )
        self.sum_by_place = _declare(library.sum_by_place, *[size] * 2, *[at] * 2, size, at)
        self.copy_rows = _declare(library.copy_rows, *[size] * 2, *[at] * 4, size)
        self.put_rows = _declare(library.put_rows, *[size] * 2, *[at] * 3)
        self.mark_rows = _declare(library.mark_rows, *[size, at] * 2)
        self.count_marks = _declare(library.count_marks, size, at, size, returns=size)
        self.find_marks = _declare(library.find_marks, size, at, size, at)
        self.sum_blocks = _declare(library.sum_blocks, size, *[at] * 4)
        self.sum_file = _declare(library.sum_file, flag, *[size] * 2, *[at] * 2, returns=size)
        self.replace_rows = _declare(
            library.replace_rows, *[size] * 2, *[at] * 2, flag, at, size, *[at] * 2
        )


def _declare(function: Any, *arguments: Any, returns: Any = None) -> Any:
    function.restype, function.argtypes = returns, arguments
    return function


def _find_sgemm() -> int | None:
    """The address of the matrix product that torch itself calls, of whatever BLAS it has."""
    torch_library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    return ctypes.cast(torch_library.sgemm_, c_void_p).value


@cache
def _load_once() -> tuple[NativeLibrary | None, str]:
    return compile_and_load(SOURCE, NativeLibrary, FLAGS)


def load_native() -> NativeLibrary | None:
    """The kernels, compiled at the first call; None where they cannot be."""
    return _load_once()[0]


def explain_missing_native() -> str:
    """Why there are none, or nothing."""
    return _load_once()[1]


def require_native() -> NativeLibrary:
    library = load_native()
    assert library is not None, explain_missing_native()
    return library


def list_addresses(tensors: Sequence[Tensor | None]) -> Any:
    """As an array of C."""
    return (c_void_p * len(tensors))(*map(address, tensors))


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor's first element; None, C's NULL, without one. Whoever calls holds the
    tensor until C has returned."""
    return None if tensor is None else tensor.data_ptr()
