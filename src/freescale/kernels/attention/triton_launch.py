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


@dataclass(frozen=True)
class KeyLaunch(AttentionLaunch):
    """Of the kernel for the gradients of keys and values, or of one of the two."""

    keys: bool = True
    values: bool = True


@dataclass(frozen=True)
class StoredLaunch:
    """Of a backward whose kernel for queries stores weights and gradients of the scores, of which
    the gradients of keys and values are then products."""

    q: AttentionLaunch
    kv: AttentionLaunch  # tiles of at most PAIR_QUERIES keys


@dataclass(frozen=True)
class PairLaunch:
    """Of the kernel that fills the table of pair biases."""

    queries: int  # of a program
    split: int  # programs that share the keys of these queries
    warps: int


# The fastest of those tried on an H200, by head width.
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
# Without biases storing the scores is slower at every width: 9.7 ms against 9.1 at 256.
STORED: dict[int, StoredLaunch] = {}
# With a table of pair biases; the kernels for keys read it with at most PAIR_KEYS keys.
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
    32: AttentionLaunch(64, 64, 4, 2, registers=168),
    64: AttentionLaunch(64, 64, 4, 3, registers=168),
    128: AttentionLaunch(128, 64, 8, 3, 2),
    # Stores nothing: `BIASED_STORED` does, in tiles of 32 keys. With 64 a kernel that Triton 3.6
    # compiles writes a wrong table.
    256: AttentionLaunch(64, 64, 4, 1),
}
BIASED_STORED = {256: StoredLaunch(AttentionLaunch(64, 32, 4, 1), AttentionLaunch(128, 64, 8, 3))}
# The sums of the biases' gradients, from the stored gradients of the scores; and without them.
STORED_SUMS = AttentionLaunch(32, 32, 2, 3)
BIAS_SUMS = {
    32: AttentionLaunch(64, 64, 4, 2),
    64: AttentionLaunch(64, 64, 4, 2),
    128: AttentionLaunch(64, 64, 4, 1, registers=168),
    256: AttentionLaunch(64, 64, 4, 1),
}
# Without it: the arithmetic of a bias, above all of time, takes registers of its own.
COMPUTED_FORWARD = AttentionLaunch(64, 64, 4, 2)
COMPUTED_KV, TIMED_KV = (KeyLaunch(64, 64, 4, 2),), (KeyLaunch(64, 32, 4, 3),)
COMPUTED_WIDE_KV = (KeyLaunch(64, 32, 4, 2, values=False), KeyLaunch(64, 32, 4, 2, keys=False))
COMPUTED_Q = AttentionLaunch(64, 64, 4, 2)
# float32 operands are split in three bfloat16 each: six products on the tensor cores, exact to 24
# bits.
FLOAT32_FORWARD, FLOAT32_KV, FLOAT32_Q = (
    AttentionLaunch(64, 64, 4, 1),
    (KeyLaunch(64, 32, 4, 1),),
    AttentionLaunch(64, 64, 4, 1),
)
FLOAT32_PRECISION = "bf16x6"
# Pairs of tokens, in whole blocks, of which a table may stand in memory during a call, 2 bytes
# each: 4 GiB. Stored scores have a pair for every head.
PAIR_BUDGET = 1 << 31
PAIR_BIAS = PairLaunch(32, 2, 2)
