"""The C kernels of csrc/, compiled when they are first needed, if there is a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.compiled import compile_and_load, declare

SOURCE = Path(__file__).with_name("csrc") / "native.c"
# Compiled for this processor. Sums are vectorised only where the source allows it.
FLAGS = (
    "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-pthread",
    "-shared", "-fPIC",
)  # fmt: skip


class Shape(Structure):
    """`Shape` of layer.h."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "width", "heads", "d_qk", "d_v", "pairs")),
        *((name, c_int64) for name in ("distances", "buckets")),
        *((name, c_void_p) for name in ("query", "key", "distance", "bucket", "token_keys")),
        ("threshold", c_int32),
        *((name, c_float) for name in ("keep_scale", "alpha", "scale", "eps")),
    ]


_SHAPE, _SIZE, _AT, _FLAG = POINTER(Shape), c_int64, c_void_p, c_int32
# (type of the result, types of the arguments) of each function
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "adopt_sgemm": (_FLAG, [_AT]),
    "keep_best": (None, [*[_SIZE] * 4, *[_AT] * 3, _SIZE]),
    "add_positions": (None, [*[_SIZE] * 3, *[_AT] * 5, c_float, _FLAG, c_float, *[_AT] * 4]),
    "differentiate_positions": (None, [*[_SIZE] * 2, *[_AT] * 3, c_float, *[_AT] * 2]),
    "measure_samples": (_FLAG, [_SIZE, *[_AT] * 2, *[_SIZE] * 2, _AT]),
    "list_pairs": (None, [_SIZE, *[_AT] * 2, *[_SIZE] * 2, _AT, c_double, _FLAG, *[_AT] * 4]),
    "count_room": (None, [_SHAPE, _SIZE, *[_AT] * 2]),
    "run_layers": (None, [_SHAPE, _SIZE, *[_AT] * 4]),
    "differentiate_layers": (None, [_SHAPE, _SIZE, *[_AT] * 6]),
    "count_softmax_room": (_SIZE, [*[_SIZE] * 4, _AT]),
    "sampled_softmax": (None, [*[_SIZE] * 5, *[_AT] * 8, c_float, _FLAG, *[_AT] * 4]),
    "gather_units": (None, [*[_SIZE] * 2, *[_AT] * 2, _FLAG, *[_AT] * 2]),
    "compare_at_positions": (None, [*[_SIZE] * 3, *[_AT] * 8, c_float, _FLAG, *[_AT] * 4]),
    "pass_norms": (None, [*[_SIZE] * 2, *[_AT] * 2, _FLAG, _AT]),
    "adam_rows": (None, [*[_SIZE] * 2, *[_AT] * 5, *[c_float] * 6, _SIZE]),
    "adam_tensors": (_FLAG, [_SIZE, *[_AT] * 6, *[c_float] * 8, _SIZE]),
    "rowwise_adagrad_rows": (None, [*[_SIZE] * 2, *[_AT] * 4, *[c_float] * 2, _SIZE]),
    "deduplicate_keys": (_SIZE, [_SIZE, _AT, _SIZE, *[_AT] * 5]),
    "mark_shared_rows": (_FLAG, [*[_SIZE, _AT] * 2, *[_AT] * 2]),
    "divide_marked_rows": (None, [_SIZE, *[_AT] * 3, _SIZE, *[_AT] * 3]),
    "sum_by_place": (None, [*[_SIZE] * 2, *[_AT] * 2, _SIZE, _AT]),
    "copy_rows": (None, [*[_SIZE] * 2, *[_AT] * 4, _SIZE]),
    "put_rows": (None, [*[_SIZE] * 2, *[_AT] * 3]),
    "mark_rows": (None, [*[_SIZE, _AT] * 2]),
    "count_marks": (_SIZE, [_SIZE, _AT, _SIZE]),
    "find_marks": (None, [_SIZE, _AT, _SIZE, _AT]),
    "sum_blocks": (None, [_SIZE, *[_AT] * 4]),
    "sum_file": (_SIZE, [_FLAG, *[_SIZE] * 2, *[_AT] * 2]),
    "replace_rows": (None, [*[_SIZE] * 2, *[_AT] * 2, _FLAG, _AT, _SIZE, *[_AT] * 2]),
}


def _load(path: str) -> ctypes.CDLL:
    """Loads the compiled kernels. A call of one releases Python's lock."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _FUNCTIONS.items():
        declare(getattr(library, name), result, *arguments)
    if not library.adopt_sgemm(_find_sgemm()):
        raise OSError("the matrix product of torch's BLAS is not as expected")
    return library


def _find_sgemm() -> int | None:
    """The address of the matrix product that torch itself calls, whatever its BLAS is."""
    torch_library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    return ctypes.cast(torch_library.sgemm_, c_void_p).value


@cache
def _load_once() -> tuple[ctypes.CDLL | None, str]:
    return compile_and_load(SOURCE, _load, FLAGS)


def load_native() -> ctypes.CDLL | None:
    """The kernels, compiled by the first call; None if they cannot be compiled."""
    return _load_once()[0]


def explain_missing_native() -> str:
    """Why there are no kernels, or an empty string."""
    return _load_once()[1]


def require_native() -> ctypes.CDLL:
    """The kernels, for callers that know they are there."""
    library = load_native()
    assert library is not None, explain_missing_native()
    return library


def list_addresses(tensors: Sequence[Tensor | None]) -> Any:
    """The addresses of some tensors, as a C array."""
    return (c_void_p * len(tensors))(*map(address, tensors))


def address(tensor: Tensor | None) -> int | None:
    """The address of a contiguous tensor, or NULL. The caller keeps the tensor until C returns."""
    return None if tensor is None else tensor.data_ptr()
