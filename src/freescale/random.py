"""Counter-based random numbers: a value is a pure function of its key, never of who computes it or
in which order.

Keys are int64 tensors. `mix` is splitmix64's finalizer; int64 arithmetic wraps, which is what it
needs. Single numbers are mixed by Python and a few of them by numpy: torch's calls would take many
times what they compute.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_UNSIGNED = (1 << 64) - 1
# shifts, each with the factor that follows it, as unsigned numbers
_STEPS = ((30, _FIRST & _UNSIGNED), (27, _SECOND & _UNSIGNED), (31, 1))
_ARRAY_STEPS = tuple((np.uint64(bits), np.uint64(factor)) for bits, factor in _STEPS)
_FEW = 4096  # numbers


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's >> keeps the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Scrambles each int64 of x, bijectively."""
    plain = type(x) is Tensor and x.is_cpu and x.dtype == torch.int64
    if plain and x.ndim and 0 < x.numel() <= _FEW:
        numbers = x.numpy().view(np.uint64).copy()
        mix_in_place(numbers)
        return torch.from_numpy(numbers.view(np.int64))
    x = (x ^ _shift_right(x, 30)).mul_(_FIRST)
    x = (x ^ _shift_right(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift_right(x, 31))


def mix_in_place(numbers: NDArray[np.uint64]) -> None:
    """`mix` of an array."""
    shifted = np.empty_like(numbers)
    for bits, factor in _ARRAY_STEPS:
        np.right_shift(numbers, bits, out=shifted)
        numbers ^= shifted
        if factor != 1:
            numbers *= factor


def derive_array(keys: NDArray[np.int64], counters: NDArray[np.int64]) -> NDArray[np.int64]:
    """`derive` of one counter, by numpy."""
    numbers = keys.view(np.uint64) * np.uint64(_GOLDEN & _UNSIGNED) + np.uint64(1)
    numbers += counters.view(np.uint64)
    mix_in_place(numbers)
    return numbers.view(np.int64)


def derive(key: Tensor | int, *counters: Tensor | int) -> Tensor:
    """A new key from a key and counters, in order; arguments broadcast."""
    result = key
    # an int stays one: as a tensor it would have to be copied to the device
    for counter in counters:
        if isinstance(result, Tensor):
            result = mix(result * _GOLDEN + counter + 1)
        elif isinstance(counter, Tensor):
            result = mix(counter + _wrap(int(result) * _GOLDEN + 1))
        else:
            result = _mix_one(int(result) * _GOLDEN + int(counter) + 1)
    return torch.as_tensor(result, dtype=torch.int64)


def _mix_one(number: int) -> int:
    """`mix` of one number, which may have more than 64 bits."""
    number &= _UNSIGNED
    for bits, factor in _STEPS:
        number = (number ^ number >> bits) * factor & _UNSIGNED
    return _wrap(number)


def _wrap(number: int) -> int:
    """The int64 of its last 64 bits."""
    number &= _UNSIGNED
    return number - (1 << 64) if number >> 63 else number


def hash_name(text: str) -> int:
    """A stable int64 for a name (Python's hash() changes from process to process)."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return _wrap(value)


def uniform(keys: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """In [0, 1), with as many bits as the type holds exactly, so that nothing rounds up to 1."""
    bits = {torch.float64: 53, torch.float32: 24}[dtype]
    return _shift_right(keys, 64 - bits).to(dtype).mul_(2.0**-bits)


def integers(keys: Tensor, bound: Tensor | int) -> Tensor:
    """In [0, bound). The bias of the remainder is below bound / 2^63."""
    return _shift_right(keys, 1) % bound


def normal(keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal by Box-Muller: one key, one number."""
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    # 24 bits: exact in float32, never 0
    first = _shift_right(keys, 40).to(inner).add_(0.5).mul_(2.0**-24)
    second = keys.bitwise_and(0xFFFFFFFF).to(inner).mul_(2.0**-32)
    return first.log_().mul_(-2).sqrt_().mul_(second.mul_(2 * math.pi).cos_()).to(dtype)


def draw_keep_mask(keys: Tensor, width: int, probability: float) -> Tensor:
    """Bool [tokens, width], True with the given probability (to 1/65536), for token keys [tokens].

    Each hash yields four 16-bit draws: dropout would otherwise cost more than the layer it follows.
    """
    quads = -(-width // 4)
    draws = derive(keys[:, None], torch.arange(quads, device=keys.device))  # [tokens, quads]
    return draws.view(torch.int16)[:, :width] < compute_keep_threshold(probability)


def compute_keep_threshold(probability: float) -> int:
    """The 16-bit draws of `draw_keep_mask`, signed, below this are kept."""
    return min(round(probability * 65536) - 32768, 32767)  # what int16 can be compared with
