"""Open files: connections to every other rank take them, and their number is limited."""

from __future__ import annotations

from contextlib import suppress

# of gloo, with a connection to each rank: torch's own, the tensors', the control messages'
_GROUPS = 3
_STORE = 1  # of rank 0, which may keep the store where ranks meet
# channels of a pipeline, beside the main thread's: three of the staged schedule, one for dense sums
# by parts
_LANES = 4
_LINES = {"cpu": 1, "cuda": 3}  # groups of gloo of a channel (collective.py, opening.py)
_SHARED = 3  # of a channel, to a rank of the same machine: a socket each way and its memory
_UCX = 2  # of a channel: a connection, and on the same machine the process
# that do not depend on the number of ranks: libraries, threads' wakeups, data, checkpoints, a GPU's
_OTHERS = 256


def per_rank(transport: str, device: str, neighbour: bool = False) -> int:
    """Descriptors that a rank needs for each other one. `transport`: not auto. `neighbour`: of the
    other, on the same machine."""
    common = _GROUPS + _STORE
    if transport == "collective":
        return common + _LANES * _LINES[device]
    if transport == "hostwire-ucx":
        return common + (1 + _LANES) * _UCX
    return common + (1 + _LANES) * (
        _SHARED if neighbour else _LINES[device] if transport == "hostwire-gloo" else 1
    )


def needed(transport: str, device: str, world: int, local_world: int) -> int:
    """Descriptors of a rank, with so many on its machine. For auto the least of what may be
    chosen."""
    near = min(world, local_world) - 1
    return _OTHERS + min(
        near * per_rank(name, device, neighbour=True) + (world - 1 - near) * per_rank(name, device)
        for name in _may_become(transport, device)
    )


def fitting(transport: str, device: str, limit: int, local_world: int = 1) -> int:
    """Ranks that so many descriptors are enough for."""
    world = 1
    for name in _may_become(transport, device):
        left, beside, elsewhere = (
            max(0, limit - _OTHERS),
            per_rank(name, device, neighbour=True),
            per_rank(name, device),
        )
        near = min(local_world - 1, left // beside)
        far = (left - near * beside) // elsewhere if near == local_world - 1 else 0
        world = max(world, 1 + near + far)
    return world


def _may_become(transport: str, device: str) -> tuple[str, ...]:
    if transport != "auto":
        return (transport,)
    return ("collective",) if device == "cpu" else ("hostwire-gloo", "hostwire-tcp", "hostwire-ucx")


def hard_limit() -> int | None:
    """The number that this process could have open; None where that is not limited."""
    try:
        import resource
    except ImportError:  # not a system of this kind
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raised() -> int | None:
    """The number that this process may have open, raised as far as a user may: what shells and
    containers give, often 1,024, is for programs that use select()."""
    if (hard := hard_limit()) is None:
        return None
    import resource

    with suppress(OSError, ValueError):  # a system that allows less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check(
    transport: str, device: str, world: int, local_world: int, limit: int | None, rank: int
) -> None:
    """`local_world` and `limit`: of that rank."""
    need = needed(transport, device, world, local_world)
    if limit is not None and need > limit:
        fit = fitting(transport, device, limit, local_world)
        raise ValueError(
            f"{world:,} ranks over {transport} need about {need:,} open files each, and rank "
            f"{rank} may have {limit:,}: start at "
            f"most {fit:,}, or raise the hard limit (`ulimit -Hn`, LimitNOFILE of the service, "
            "nofile of the container)"
        )
