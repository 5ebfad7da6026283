"""The snapshots that holders have: which one a restart uses, which expire, who has copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freescale.train.state.disk import Damaged
from freescale.train.state.memory import Segment

Names = Sequence[str]  # of memory files


@dataclass(frozen=True)
class Held:
    """The state of `owner`, one of `ranks`, after `step`, as a memory file."""

    ranks: int
    owner: int
    step: int

    def __str__(self) -> str:
        return f"the snapshot of rank {self.owner} after step {self.step}"

    @property
    def name(self) -> str:
        return f"{self.ranks}/{self.owner}/{self.step}"

    @staticmethod
    def parse(name: str) -> Held | None:
        """None if it is not a name of ours."""
        try:
            ranks, owner, step = map(int, name.split("/"))
        except ValueError:
            return None
        held = Held(ranks, owner, step)
        return held if held.name == name else None

    def describe(self, run: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The header of the file."""
        about = {"run": run, "ranks": self.ranks, "rank": self.owner, "step": self.step}
        return about | {"state": dict(state)}

    def check(self, segment: Segment, run: str) -> None:
        """Damaged if a file is not what its name promises, or another run's."""
        header = segment.header
        if header.get("run") != run:
            raise Damaged(f"{self} is another run's")
        ranks, owner, step = found = [header.get(key) for key in ("ranks", "rank", "step")]
        if found != [self.ranks, self.owner, self.step]:
            raise Damaged(
                f"{self} holds another state: of rank {owner} of {ranks} after step {step}"
            )


def parse_names(names: Names) -> set[Held]:
    """Other names are left out."""
    return {held for held in map(Held.parse, names) if held is not None}


def find_superfluous(names: Names, owners: Collection[int], saved: Held) -> list[str]:
    """What a machine that holds the states of `owners` may drop once `saved`, and what other ranks
    have saved after the same step, is complete: all except these and the last one before them."""
    kept: set[str] = set()
    for owner in owners:
        own = {
            held.step
            for held in parse_names(names)
            if (held.ranks, held.owner) == (saved.ranks, owner)
        }
        steps = {saved.step, *sorted(own - {saved.step})[-1:]}
        kept |= {Held(saved.ranks, owner, step).name for step in steps}
    return [name for name in names if name not in kept]


# ---- which one a restart uses


@dataclass(frozen=True)
class Choice:
    """The snapshots that a restart uses."""

    step: int
    readers: tuple[int, ...]  # [ranks]: the rank that reads each one's from its machine's holder


def choose_snapshots(
    names: Sequence[Names], machines: Sequence[bytes | str], refused: Sequence[int] = ()
) -> Choice | None:
    """The newest step that is complete for all ranks, on whichever machines, and not refused. names
    [ranks]: of the memory files on each rank's machine. A rank reads its own if its machine has it;
    otherwise the first rank of another machine does."""
    world = len(names)
    first = {machine: machines.index(machine) for machine in machines}
    held = {rank: parse_names(names[rank]) for rank in first.values()}
    everywhere = set().union(*held.values())
    steps = {
        step
        for step in {each.step for each in everywhere} - set(refused)
        if all(Held(world, owner, step) in everywhere for owner in range(world))
    }
    if not steps:
        return None
    step, readers = max(steps), []
    for owner in range(world):
        here = first[machines[owner]]
        has = [rank for rank in sorted(held) if Held(world, owner, step) in held[rank]]
        readers.append(owner if here in has else has[0])
    return Choice(step, tuple(readers))


def explain_none(names: Sequence[Names]) -> str:
    """Why no step is complete for all ranks."""
    world = len(names)
    found = {held for each in names for held in parse_names(each)}
    if not found:
        return "no snapshot is in memory"
    here = {held.owner for held in found if held.ranks == world}
    if not here:
        others = ", ".join(map(str, sorted({held.ranks for held in found})))
        return f"the snapshots in memory are of {others} ranks, not {world}"
    missing = [str(owner) for owner in range(world) if owner not in here]
    if missing:
        return f"no snapshot of rank {', '.join(missing)} is in memory"
    return "the snapshots in memory have no step in common, or are damaged"


def choose_buddies(machines: Sequence[bytes | str]) -> list[int | None]:
    """[ranks]: who keeps a copy of each rank's snapshots, on the next machine; None: only one."""
    groups: dict[bytes | str, list[int]] = {}
    for rank, machine in enumerate(machines):
        groups.setdefault(machine, []).append(rank)
    order = list(groups.values())
    if len(order) < 2:
        return [None] * len(machines)
    buddies: dict[int, int] = {}
    for here, there in zip(order, [*order[1:], order[0]], strict=True):
        buddies |= {rank: there[place % len(there)] for place, rank in enumerate(here)}
    return [buddies[rank] for rank in range(len(machines))]
