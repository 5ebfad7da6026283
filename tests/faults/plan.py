"""Plans a storm: which faults happen to a run, to which rank, and at which moment of its work. Pure
functions of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from faults.moments import (
    CHECKPOINT,
    MEETING,
    PREPARE,
    RESTORE,
    SNAPSHOT,
    STEP,
    Moment,
    list_moments,
)

CHECKPOINT_EVERY = 4  # steps
_LONGEST = 6  # steps between two faults
_FIRST = 3 * CHECKPOINT_EVERY  # steps before the first fault: two checkpoints are complete
_STEPS_A_SECOND = 20  # at most, beside a disturbance that passes
_BY_TIMER = 0.15  # share of the faults of a step that happen at any time, not at a named moment


@dataclass(frozen=True)
class Kind:
    """A kind of faults.

    Attributes:
        about: what happens, in words.
        ends: whether the attempt at the run ends with it.
        moments: groups of moments at which it may happen.
        needs: what the testbed must have: "disk" (one of its own), "hosts" (a network of its own),
            "packets" (the same, with nftables), "snapshots" (the run takes some).
        seconds: (shortest, longest) of a disturbance that passes.
    """

    about: str
    ends: bool
    moments: Sequence[str]
    needs: str = ""
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def is_of_start(self) -> bool:
        """Whether it happens while an attempt starts, and hence only after another one ended."""
        return self.moments[0] in (PREPARE, MEETING, RESTORE)


KINDS = {
    "kill rank": Kind("a rank is killed (SIGKILL)", True, (STEP,)),
    "kill in checkpoint": Kind("a rank is killed while it saves", True, (CHECKPOINT,)),
    "kill in snapshot": Kind(
        "a rank is killed while it takes a snapshot", True, (SNAPSHOT,), "snapshots"
    ),
    "kill keeper": Kind(
        "a rank and the keeper of the snapshots are killed", True, (STEP, SNAPSHOT), "snapshots"
    ),
    "kill in restore": Kind("a rank is killed while it restores", True, (RESTORE,)),
    "kill in meeting": Kind("a rank is killed while the ranks meet", True, (MEETING,)),
    "kill in preparation": Kind("a process is killed that prepares the data", True, (PREPARE,)),
    "kill launcher": Kind("the launcher is killed", True, (STEP, CHECKPOINT)),
    "kill machine": Kind(
        "all processes of a machine are killed, its keeper too", True, (STEP, CHECKPOINT)
    ),
    "damage": Kind("all is killed, and the newest checkpoint damaged", True, (STEP, CHECKPOINT)),
    "preempt launcher": Kind("SIGTERM to the launcher", True, (STEP, CHECKPOINT)),
    "preempt rank": Kind("SIGUSR1 to a rank", True, (STEP,)),
    "stall": Kind("a rank is stopped (SIGSTOP) for longer than --timeout", True, (STEP,)),
    "pause": Kind("a rank is stopped for a moment", False, (STEP, CHECKPOINT), "", (0.2, 1.0)),
    "clock": Kind("the clock of a rank jumps by an hour", False, (STEP, CHECKPOINT)),
    "disk full": Kind("the disk is full while the run saves", True, (CHECKPOINT,), "disk"),
    "link down": Kind(
        "a host's link is down for longer than --timeout", True, (STEP,), "hosts", (0.5, 5.0)
    ),
    "link drops": Kind(
        "a host's link is down for a moment", False, (STEP, CHECKPOINT), "hosts", (0.2, 1.0)
    ),
    "link loses": Kind(
        "a host loses 30 % of its packets", False, (STEP, CHECKPOINT), "packets", (2.0, 10.0)
    ),
    "link slow": Kind(
        "a host's link has a tenth of its rate", False, (STEP, CHECKPOINT), "hosts", (2.0, 10.0)
    ),
}


@dataclass(frozen=True)
class Fault:
    """One fault of a storm.

    Attributes:
        number: in the storm, from 0.
        kind: of `KINDS`.
        rank: to which it happens.
        moment: of `MOMENTS`, which the rank reaches; None: at any time, `delay` seconds after the
            run has made `after` steps.
        after: steps that the run makes after the fault before.
        seconds: of a disturbance that passes.
        draw: a number for what else has to be chosen.
    """

    number: int
    kind: str
    rank: int
    moment: str | None
    after: int
    delay: float
    seconds: float
    draw: int


def plan_faults(seed: int, number: int, world: int, kinds: Sequence[str]) -> list[Fault]:
    """The faults of a storm, in their order.

    Every kind has its turn before one comes again, and so has every moment of a group; the order
    within a turn, the ranks and the numbers of steps are random.

    Args:
        seed: of the storm.
        number: of faults.
        world: ranks of the run.
        kinds: names of those that the testbed has; one at least ends an attempt in a step.

    Raises:
        ValueError: a kind has another name, or none is of a step.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ValueError(f"no such kind of faults: {', '.join(unknown)}")
    if not any(not KINDS[kind].is_of_start for kind in kinds):
        raise ValueError("the kinds of a storm need one that happens while the run trains")
    draw = random.Random(f"faults {seed}")
    turns = _Turns(draw)
    faults: list[Fault] = []
    left: list[str] = []
    before = ""
    for count in range(number):
        kind = _choose_kind(draw, left, kinds, before)
        about = KINDS[kind]
        group = draw.choice(about.moments)
        moment, timer = turns.take(group), draw.random() < _BY_TIMER
        rank = 0 if moment.rank_0 else draw.randrange(world)
        lowest = _FIRST if count == 0 else 1
        faults.append(
            Fault(
                count,
                kind,
                rank,
                None if timer and group == STEP else moment.name,
                0 if about.is_of_start else lowest + draw.randrange(_LONGEST),
                draw.uniform(0.0, 0.3),
                draw.uniform(*about.seconds),
                draw.randrange(1 << 30),
            )
        )
        before = kind
    return faults


def order_worlds(seed: int, fewest: int, most: int) -> list[int]:
    """The numbers of ranks that the attempts of a run have in turn: each of them, in a random
    order."""
    worlds = list(range(fewest, most + 1))
    random.Random(f"ranks {seed}").shuffle(worlds)
    return worlds


def count_steps(faults: Sequence[Fault]) -> int:
    """How long a run is that ends after the last of them. Each happens `after` steps after the run
    has gone on, or somewhat later; most set it back by some steps. The run trains on while a link
    is slow."""
    passing = sum(fault.seconds for fault in faults if not KINDS[fault.kind].ends)
    return sum(fault.after + 3 for fault in faults) + _FIRST + int(_STEPS_A_SECOND * passing)


def put_off(faults: Sequence[Fault], number: int) -> list[Fault]:
    """The plan of a storm that was interrupted and goes on with fault `number`, which may have
    happened already. A disk is full at a later checkpoint than before: a run that fails twice at
    one step is not started again."""
    return [
        replace(fault, after=fault.after + 2 * CHECKPOINT_EVERY)
        if fault.number == number and fault.kind == "disk full"
        else fault
        for fault in faults
    ]


def _choose_kind(draw: random.Random, left: list[str], kinds: Sequence[str], before: str) -> str:
    """The next kind out of those `left` of a turn. What happens while an attempt starts follows
    what ended one; a disk is not full twice in a row, which would be a failure that repeats."""

    def fits(kind: str) -> bool:
        ended = before != "" and KINDS[before].ends
        return (ended or not KINDS[kind].is_of_start) and not kind == before == "disk full"

    while not any(fits(kind) for kind in left):
        another = list(kinds)
        draw.shuffle(another)
        left += another
    chosen = next(kind for kind in left if fits(kind))
    left.remove(chosen)
    return chosen


class _Turns:
    """Moments of each group, all of them before one comes again."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._left: dict[str, list[Moment]] = {}

    def take(self, group: str) -> Moment:
        left = self._left.setdefault(group, [])
        if not left:
            left += list_moments(group)
            self._draw.shuffle(left)
        return left.pop()
