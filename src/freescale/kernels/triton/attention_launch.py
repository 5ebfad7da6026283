"""How the attention kernels are launched: tiles, warps and stages by dtype, head width and bias."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionLaunch:
    """Shape of one kernel's work."""

    tile: int  # tokens of a program; a multiple of `inner`
    inner: int  # tokens of one turn of its loop
    warps: int
    stages: int  # of the loop over tiles without a mask
    masked_stages: int = 1
    # per thread: a limit that lets one more program run on a multiprocessor
    registers: int | None = None


# The fastest of those tried on an H200, by head width.
FORWARD = {
    32: AttentionLaunch(64, 64, 4, 3, registers=128),
    64: AttentionLaunch(128, 64, 4, 3, 2),
    128: AttentionLaunch(128, 64, 4, 2, 2),
}
BACKWARD_KV = {
    32: AttentionLaunch(64, 64, 4, 3, registers=128),
    64: AttentionLaunch(64, 64, 4, 3, registers=168),
    128: AttentionLaunch(64, 64, 4, 2, 2),
}
BACKWARD_Q = {
    32: AttentionLaunch(64, 64, 4, 3, registers=128),
    64: AttentionLaunch(64, 64, 4, 3, registers=168),
    128: AttentionLaunch(128, 64, 8, 3, 2),
}
# The arithmetic of a bias, above all of time, takes registers of its own.
BIASED_FORWARD, BIASED_KV, BIASED_Q = (
    AttentionLaunch(64, 64, 4, 2),
    AttentionLaunch(64, 64, 4, 2),
    AttentionLaunch(64, 64, 4, 2),
)
TIMED_KV = AttentionLaunch(64, 32, 4, 3)
BIAS_SUMS, TIMED_SUMS = AttentionLaunch(64, 64, 4, 1, registers=168), AttentionLaunch(64, 64, 4, 1)
# float32 operands are split in three bfloat16 each: six products on the tensor cores, exact to 24
# bits.
FLOAT32_FORWARD, FLOAT32_KV, FLOAT32_Q = (
    AttentionLaunch(64, 64, 4, 1),
    AttentionLaunch(64, 32, 4, 1),
    AttentionLaunch(64, 64, 4, 1),
)
FLOAT32_PRECISION = "bf16x6"
