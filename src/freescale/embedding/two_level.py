"""The two-level exchange: between machines, a row crosses once per machine and not once per rank.

For every owner, a rank of each machine is the leader: all ranks of its machine send it their
requests, and it requests the different rows of all of them. Leaders have the owner's number within
the machine, so every rank leads for a part of the owners, and an owner leads for itself.

    ids         rank -> leader: deduplicated -> owner
    rows        owner -> leader -> each rank that requested the row
    gradients   rank -> leader: summed in the order of its ranks -> owner: summed in the order of
                the leaders, its own sum among them

Only what the owner and the leaders exchange is rounded (`wire`): a row once, and a sum once, after
the ranks' gradients have been added up as they are. The owner learns the largest mark and the sum
of the draws of an id, exact integers: dynamic tables decide as in the flat exchange.

Both hops are AllToAlls of all ranks, with nothing for most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.embedding.request import Relay, RequestPart
from freescale.transport.api import Handle, Sizes, Transport

EXCHANGES = ("auto", "flat", "two-level")
# Mean ranks of a machine from which on `auto` takes two levels: fewer have few rows in common.
_FEWEST = 4


def choose_exchange(
    requested: str, machines: Sequence[int], rdma: bool, recorded: str | None = None
) -> tuple[str, str]:
    """Returns flat or two-level, and the reason, never by times: it decides the order of sums.

    Args:
        requested: one of EXCHANGES.
        machines: the machine of each rank.
        rdma: whether RDMA connects them. It is about as fast as PCIe, which the second hop crosses.
        recorded: what a checkpoint was trained with.

    Raises:
        ValueError: the request is unknown, or the checkpoint was trained with another exchange.
    """
    if requested not in EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}, not {requested!r}")
    if recorded is not None:
        if requested not in ("auto", recorded):
            raise ValueError(
                f"exchange {requested!r}, but the checkpoint was trained with {recorded!r}, which "
                f"adds gradients in another order: pass --exchange {recorded} or auto"
            )
        return recorded, "as in the checkpoint"
    if requested != "auto":
        return requested, "as requested"
    count = len(set(machines))
    if count == 1:
        return "flat", "one machine"
    about = f"{len(machines)} ranks on {count} machines"
    if len(machines) < _FEWEST * count:
        return "flat", f"{about}: fewer than {_FEWEST} each read few rows twice"
    if rdma:
        return "flat", f"{about}: RDMA is as fast as a second hop"
    return "two-level", f"{about}: rows cross once per machine"


def is_two_level(exchange: str, machines: Sequence[int]) -> bool:
    """Whether there are two levels: on one machine, or machines of one rank each, they are one, and
    sums have the order of the flat exchange."""
    return exchange == "two-level" and 1 < len(set(machines)) < len(machines)


@dataclass(frozen=True)
class Route:
    """Whom a rank talks to; every list has an entry per rank. Flat: it asks all owners itself."""

    near: list[int]  # 1 for the ranks of this machine
    leads: list[int]  # 1 for owners that this rank requests rows of
    leaders: list[int]  # 1 for ranks that request rows of this one
    # the rank of this machine that requests the rows of each owner; None: this rank, of all
    through: list[int] | None


def plan_route(exchange: str, machines: Sequence[int], rank: int) -> Route:
    """Plans the route of a rank."""
    world = len(machines)
    if not is_two_level(exchange, machines):
        return Route([1] * world, [1] * world, [1] * world, None)
    members: dict[int, list[int]] = {}
    for other, machine in enumerate(machines):
        members.setdefault(machine, []).append(other)

    def find_leader(machine: int, owner: int) -> int:
        number = members[machines[owner]].index(owner)
        return members[machine][number % len(members[machine])]

    through = [find_leader(machines[rank], owner) for owner in range(world)]
    leaders = {find_leader(machine, rank) for machine in members}
    return Route(
        [int(machine == machines[rank]) for machine in machines],
        [int(leader == rank) for leader in through],
        [int(other in leaders) for other in range(world)],
        through,
    )


def order_by_leader(through: Sequence[int], own: Sizes) -> tuple[list[int], list[int]]:
    """own [world]: rows requested of each owner. Returns the owners in the order in which their
    rows go to the leaders, and how many each leader gets."""
    send = [0] * len(own)
    for leader, count in zip(through, own, strict=True):
        send[leader] += count
    return sorted(range(len(own)), key=lambda owner: (through[owner], owner)), send


def exchange_counts(
    send: Sizes, total: int, to: Sizes, sources: Sizes, transport: Transport, kind: str
) -> tuple[list[int], int]:
    """send [world]: how many rows this rank requests from each of those that `to` marks. Returns
    how many each of the `sources` requests from it, and the sum of their totals. A collective."""
    # From host to host, of a GPU too: a few numbers, which nobody wants on a device.
    counts = torch.tensor([[n, total] for n, goes in zip(send, to, strict=True) if goes])
    arrived = transport.all_to_all(counts.view(-1, 2), to, sources, kind).wait().tolist()
    numbers = iter(arrived)
    receive = [next(numbers)[0] if comes else 0 for comes in sources]
    return receive, sum(each for _, each in arrived)


class TwoHops:
    """A `Handle` on what goes through the leaders. Its second hop sets off when the first has
    ended, in `advance` or `wait`."""

    def __init__(
        self,
        first: Handle,
        start: Callable[[Tensor], Handle],
        arrange: Callable[[Tensor], Tensor] = lambda arrived: arrived,
    ) -> None:
        """`start`: begins the second hop with what has arrived; `arrange`: orders its result."""
        self.path, self.bytes = first.path, first.bytes
        self._first, self._start, self._arrange = first, start, arrange
        self._second: Handle | None = None

    def advance(self) -> Handle:
        """Waits for the first hop and starts the second. A collective."""
        if self._second is None:
            self._second = self._start(self._first.wait())
        return self._second

    def wait(self, host: bool = False) -> Tensor:
        return self._arrange(self.advance().wait(host))


def pass_on(
    handle: Handle, part: RequestPart, relay: Relay, transport: Transport, kind: str
) -> TwoHops:
    """What owners send leaders for each row of a part, on to the ranks that requested it. All rows
    of a request arrive in its order; a part in that of `part.places`."""

    def start(arrived: Tensor) -> Handle:
        chosen = arrived.index_select(0, relay.members)
        return transport.all_to_all(chosen, relay.receive, relay.send, kind)

    def arrange(arrived: Tensor) -> Tensor:
        return torch.empty_like(arrived).index_copy_(0, relay.requested.long(), arrived)

    return TwoHops(handle, start, arrange) if part.requested is None else TwoHops(handle, start)
