"""How the attention kernels are launched: tiles, warps and stages by dtype, head width and bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch parameters of one kernel."""

    tile: int  # tokens of a program; a multiple of `inner`
    inner: int  # tokens of one iteration of its loop
    warps: int
    stages: int  # of the loop over tiles without a mask
    masked_stages: int = 1
    registers: int | None = None  # limit per thread that fits one more program on an SM


@dataclass(frozen=True)
class KeyLaunch(AttentionLaunch):
    """The kernel for the gradients of keys, of values, or of both."""

    keys: bool = True
    values: bool = True


@dataclass(frozen=True)
class PairLaunch:
    """The kernel that fills the table of pair biases."""

    queries: int  # of a program
    split: int  # programs that share the keys of its queries
    warps: int


# By head width: the fastest of those tried on an H200.
FORWARD = {
    32: AttentionLaunch(64, 64, 4, 3, registers=128),
    64: AttentionLaunch(128, 64, 4, 3, 2),
    128: AttentionLaunch(128, 64, 4, 2, 2),
    256: AttentionLaunch(128, 64, 8, 2, 2),
}
BACKWARD_KV: dict[int, tuple[KeyLaunch, ...]] = {
    32: (KeyLaunch(64, 64, 4, 3, registers=128),),
    64: (KeyLaunch(64, 64, 4, 3, registers=168),),
    128: (KeyLaunch(64, 64, 4, 2, 2),),
    256: (KeyLaunch(128, 32, 8, 2, values=False), KeyLaunch(128, 64, 8, 2, 2, keys=False)),
}
BACKWARD_Q = {
    32: AttentionLaunch(64, 64, 4, 3, registers=128),
    64: AttentionLaunch(64, 64, 4, 3, registers=168),
    128: AttentionLaunch(128, 64, 8, 3, 2),
    256: AttentionLaunch(64, 64, 4, 2, 2),
}
# With a table of pair biases. The kernels for keys read at most PAIR_KEYS keys of it at a time.
BIASED_FORWARD = {
    32: AttentionLaunch(64, 64, 4, 3),
    64: AttentionLaunch(64, 64, 4, 3),
    128: AttentionLaunch(128, 64, 4, 2),
    256: AttentionLaunch(128, 32, 8, 2),
}
BIASED_KV: dict[int, tuple[KeyLaunch, ...]] = {
    32: (KeyLaunch(64, 64, 4, 2, registers=168),),
    64: (KeyLaunch(64, 64, 4, 2, 2, registers=168),),
    128: (KeyLaunch(64, 64, 4, 2, 2),),
    256: (KeyLaunch(64, 64, 4, 1, values=False), KeyLaunch(64, 64, 4, 1, keys=False)),
}
BIASED_Q = {
    32: AttentionLaunch(64, 64, 4, 2),
    64: AttentionLaunch(64, 64, 4, 3),
    128: AttentionLaunch(64, 64, 4, 2),
    256: AttentionLaunch(64, 32, 4, 1),
}
# Without a table of pair biases: computing a bias, above all that of time, takes registers.
COMPUTED_FORWARD = AttentionLaunch(64, 64, 4, 2)
COMPUTED_KV, TIMED_KV = (KeyLaunch(64, 64, 4, 2),), (KeyLaunch(64, 32, 4, 3),)
COMPUTED_WIDE_KV = (KeyLaunch(64, 32, 4, 2, values=False), KeyLaunch(64, 32, 4, 2, keys=False))
COMPUTED_Q = AttentionLaunch(64, 64, 4, 2)
# float32 operands are split into three bfloat16: six products on tensor cores, exact to 24 bits.
FLOAT32_FORWARD, FLOAT32_KV, FLOAT32_Q = (
    AttentionLaunch(64, 64, 4, 1),
    (KeyLaunch(64, 32, 4, 1),),
    AttentionLaunch(64, 64, 4, 1),
)
FLOAT32_PRECISION = "bf16x6"
# Most pairs of tokens, in whole blocks, in a table that a call makes: 4 GiB at 2 bytes each, and a
# share of the device's memory; and in one that forward keeps for backward, in each layer.
PAIR_BUDGET, BUDGET_SHARE, KEPT_SHARE = 1 << 31, 1 / 32, 1 / 192
PAIR_BIAS = PairLaunch(32, 2, 2)
# A softmax has the launches without biases; forward keeps more in registers.
SOFTMAX_FORWARD = {
    32: AttentionLaunch(64, 64, 4, 3),
    64: AttentionLaunch(128, 64, 4, 3),
    128: AttentionLaunch(128, 64, 8, 3),
    256: AttentionLaunch(128, 32, 8, 2),
}
# Of heads of 128 if queries see some keys only: most tiles have a mask, which takes registers.
LOCAL_FORWARD = AttentionLaunch(64, 64, 4, 3, 2)


class Launches(NamedTuple):
    """The launches of one attention."""

    forward: AttentionLaunch
    of_keys: tuple[KeyLaunch, ...]
    of_queries: AttentionLaunch
    tabled: bool = False  # whether they read a table of pair biases


def choose_launches(
    width: int, *, narrow: bool, biased: bool, timed: bool, tabled: bool, softmax: bool = False,
    visible: bool = False,
) -> Launches:  # fmt: skip
    """Chooses the launches for heads of this width.

    Args:
        width: Of a head.
        narrow: Whether the inputs have 16 bits.
        biased: Whether there is a bias.
        timed: Whether there is a bias by time.
        tabled: Whether there is memory for a table of pair biases.
        softmax: Whether weights are those of a softmax, which has no biases.
        visible: Whether queries see some keys only.
    """
    if not narrow:
        return Launches(FLOAT32_FORWARD, FLOAT32_KV, FLOAT32_Q)
    of_keys = BACKWARD_KV[width]
    if softmax:  # dropout takes registers
        of_keys = tuple(replace(launch, registers=None) for launch in of_keys)
    if softmax or not biased:
        forward = SOFTMAX_FORWARD[width] if softmax else FORWARD[width]
        if visible and width == 128:
            forward = LOCAL_FORWARD
        return Launches(forward, of_keys, BACKWARD_Q[width])
    if tabled:
        own = BIASED_FORWARD[width], BIASED_KV[width], BIASED_Q[width]
        return Launches(*own, tabled=True)
    of_keys = TIMED_KV if timed else COMPUTED_KV
    return Launches(COMPUTED_FORWARD, COMPUTED_WIDE_KV if width == 256 else of_keys, COMPUTED_Q)
