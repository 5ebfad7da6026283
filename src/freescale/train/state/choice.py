"""What snapshots decide, as pure functions: who keeps a copy for whom, which state a restart takes,
and how often a snapshot can be taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Names = Sequence[str]


@dataclass(frozen=True)
class Link:
    """A memory file, as its name says: what `owner`, of `ranks`, has after `step`, whole or since
    the step `parent`."""

    ranks: int
    owner: int
    step: int
    parent: int | None

    @property
    def name(self) -> str:
        since = "whole" if self.parent is None else f"since-{self.parent}"
        return f"{self.ranks}/{self.owner}/{self.step}/{since}"

    @staticmethod
    def parse(name: str) -> Link | None:
        """None if it is no name of ours."""
        try:
            ranks, owner, step, since = name.split("/")
            parent = None if since == "whole" else int(since.removeprefix("since-"))
            link = Link(int(ranks), int(owner), int(step), parent)
        except ValueError:
            return None
        return link if link.name == name and (parent is None or parent < link.step) else None


def find_chains(names: Names) -> dict[tuple[int, int], dict[int, tuple[Link, ...]]]:
    """(ranks, owner) -> step -> the memory files that make it up: a whole one, then changes. Steps
    whose files are not all there are left out; of two ways, the one with fewer files is taken."""
    links = [link for link in map(Link.parse, names) if link is not None]
    found: dict[tuple[int, int], dict[int, tuple[Link, ...]]] = {}
    for link in sorted(links, key=lambda each: (each.step, each.parent is not None)):
        chains = found.setdefault((link.ranks, link.owner), {})
        if link.parent is None:
            chains[link.step] = (link,)
        elif link.parent in chains and link.step not in chains:
            chains[link.step] = (*chains[link.parent], link)
    return {key: chains for key, chains in found.items() if chains}


@dataclass(frozen=True)
class Choice:
    """The snapshots that a restart takes."""

    step: int
    readers: tuple[int, ...]  # of each rank's: the rank that reads it from its machine's holder
    chains: tuple[tuple[Link, ...], ...]  # of each rank


def choose_snapshots(
    held: Sequence[Names], machines: Sequence[bytes | str], refused: Sequence[int] = ()
) -> Choice | None:
    """The newest step that is complete for all ranks, on whichever machines, and not refused; None
    if there is none. held [ranks]: names of the memory files on the machine of each rank. A rank
    reads its own from its own machine if that has it; otherwise another rank does: the machine's
    first."""
    world = len(held)
    first = {machine: machines.index(machine) for machine in machines}
    chains = {rank: find_chains(held[rank]) for rank in first.values()}
    steps = set.intersection(
        *(
            {step for of in chains.values() for step in of.get((world, owner), {})}
            for owner in range(world)
        )
    ) - set(refused)
    if not steps:
        return None
    step = max(steps)
    readers, taken = [], []
    for owner in range(world):
        here = first[machines[owner]]
        order = [here, *(rank for rank in sorted(chains) if rank != here)]
        reader = next(rank for rank in order if step in chains[rank].get((world, owner), {}))
        readers.append(owner if reader == here else reader)
        taken.append(chains[reader][world, owner][step])
    return Choice(step, tuple(readers), tuple(taken))


def explain_none(held: Sequence[Names]) -> str:
    """Why no step is complete for all ranks."""
    world = len(held)
    chains = [key for names in held for key in find_chains(names)]
    if not chains:
        return "no snapshot is in memory"
    here = {owner for ranks, owner in chains if ranks == world}
    if not here:
        others = ", ".join(map(str, sorted({ranks for ranks, _ in chains})))
        return f"the snapshots in memory are of {others} ranks, not {world}"
    missing = [str(owner) for owner in range(world) if owner not in here]
    if missing:
        return f"no snapshot of rank {', '.join(missing)} is in memory"
    return "the snapshots in memory have no step in common, or are damaged"


def choose_buddies(machines: Sequence[bytes | str]) -> list[int | None]:
    """[ranks], the rank that keeps a copy of each rank's snapshots: one of the next machine. None
    where there is one machine only."""
    groups: dict[bytes | str, list[int]] = {}
    for rank, machine in enumerate(machines):
        groups.setdefault(machine, []).append(rank)
    order = list(groups.values())
    if len(order) < 2:
        return [None] * len(machines)
    following = {id(here): there for here, there in zip(order, [*order[1:], order[0]], strict=True)}
    buddies: dict[int, int] = {}
    for here in order:
        there = following[id(here)]
        buddies |= {rank: there[place % len(there)] for place, rank in enumerate(here)}
    return [buddies[rank] for rank in range(len(machines))]


def choose_interval(shortest: int, snapshot_seconds: float, step_seconds: float) -> int:
    """The least number of steps between two snapshots at which one is complete, with its copy,
    before the next is due; at least `shortest`."""
    if step_seconds <= 0:
        return shortest
    return max(shortest, math.ceil(snapshot_seconds / step_seconds))


def choose_affordable(
    least: int, processor_seconds: float, step_seconds: float, budget: float
) -> int:
    """The least number of steps between two snapshots of which one takes `processor_seconds` and
    the steps between two as a whole `1 / budget` times as long; at least `least`."""
    if step_seconds <= 0:
        return least
    return max(least, math.ceil(processor_seconds / (budget * step_seconds)))


def must_merge(sizes: Mapping[Link, int], chain: Sequence[Link], longest: int = 64) -> bool:
    """Whether the changes of a chain are as large as the state that they begin with, or too
    many."""
    base, *changes = chain
    return len(changes) >= longest or sum(sizes[link] for link in changes) > sizes[base]
