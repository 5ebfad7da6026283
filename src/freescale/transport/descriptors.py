"""File descriptors: connections to every other rank take them, and their number is limited."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from functools import partial

# gloo groups of a channel, by device: gloo moves a group's bytes by one thread, which is not enough
# for a GPU's
LINES = {"cpu": 1, "cuda": 3}
# of gloo, with a connection to each rank: torch's own, the tensors', the control messages'
_GROUPS = 3
_STORE = 1  # of rank 0, which may keep the store where ranks meet
# channels of a pipeline, in addition to the main thread's: three of the staged schedule, one of the
# partitioned all-reduce
_LANES = 4
_SHARED = 3  # of a channel, to a rank of the same machine: a socket each way and its memory
_UCX = 2  # of a channel: a connection, and on the same machine the process
# that do not depend on the number of ranks: libraries, threads' wakeups, data, checkpoints, a GPU's
_OTHERS = 256


def count_per_rank(transport: str, device: str, neighbour: bool = False) -> int:
    """Descriptors that a rank needs for each other one, a `neighbour` if on the same machine."""
    common = _GROUPS + _STORE
    if transport == "collective":
        return common + _LANES * LINES[device]
    if transport == "hostwire-ucx":
        return common + (1 + _LANES) * _UCX
    return common + (1 + _LANES) * (_SHARED if neighbour else 1)


def count_needed(transport: str, device: str, world: int, local_world: int) -> int:
    """Descriptors that one of `world` ranks needs; for auto the least of what may be chosen."""
    near = min(world, local_world) - 1
    far = world - 1 - near
    candidates: tuple[str, ...] = (transport,)
    if transport == "auto":
        candidates = ("hostwire-tcp", "collective" if device == "cpu" else "hostwire-ucx")
    return _OTHERS + min(
        near * count_per_rank(name, device, neighbour=True) + far * count_per_rank(name, device)
        for name in candidates
    )


def count_fitting_ranks(transport: str, device: str, limit: int, local_world: int = 1) -> int:
    """The largest number of ranks that `limit` descriptors each are enough for."""
    worlds = range(1, max(1, limit))  # each other rank takes one at least
    need = partial(count_needed, transport, device, local_world=local_world)
    return max(1, bisect_right(worlds, limit, key=lambda world: need(world=world)))


def read_hard_limit() -> int | None:
    """The most descriptors that this process could have open; None where that is not limited."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raise_limit() -> int | None:
    """Raises the soft limit of open descriptors as far as a user may, and returns it; None: none.
    What shells and containers set, often 1,024, is for programs that use select()."""
    if (hard := read_hard_limit()) is None:
        return None
    import resource

    with suppress(OSError, ValueError):  # a system that allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_limit(
    transport: str, device: str, world: int, local_world: int, limit: int | None, rank: int
) -> None:
    """ValueError if `rank`, with `local_world` ranks on its machine, needs more than `limit`."""
    need = count_needed(transport, device, world, local_world)
    if limit is not None and need > limit:
        fit = count_fitting_ranks(transport, device, limit, local_world)
        raise ValueError(
            f"{world:,} ranks over {transport} need about {need:,} open files each, and rank "
            f"{rank} may have {limit:,}: start at most {fit:,}, or raise the hard limit "
            "(`ulimit -Hn`, LimitNOFILE of the service, nofile of the container)"
        )
