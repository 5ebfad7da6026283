"""Chains of states: a full one, and deltas that each hold what changed since the one before.

    full  <-  delta  <-  delta

Everything here is a pure function: which chains are complete, what may be removed, when a chain is
made one full state again, which state a restart uses, and who keeps a copy for whom.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

Names = Sequence[str]


class Damaged(ValueError):
    """A state is not as it was written."""

    @staticmethod
    def advise(what: str) -> Damaged:
        """With what the user can do."""
        return Damaged(f"{what}: use an earlier checkpoint")


# ---- what has to stay


def find_needed(parents: Mapping[int, int | None], steps: Iterable[int]) -> set[int]:
    """These steps and all that they depend on. `parents`: the parent of each step that exists; None
    of a full one."""
    needed: set[int] = set()
    for step in steps:
        link: int | None = step
        while link is not None and link in parents and link not in needed:
            needed.add(link)
            link = parents[link]
    return needed


def find_expired(
    parents: Mapping[int, int | None], saved: int, keep: int, protected: Collection[int] = ()
) -> list[int]:
    """The steps that may go once a state is saved: all except the last `keep` (`saved`, the one
    just saved, is the last), the protected, and what these depend on. `parents`: as for
    `find_needed`."""
    others = sorted(step for step in parents if step != saved)
    last = others[max(0, len(others) - keep + 1) :]
    needed = find_needed(parents, [saved, *last, *protected])
    return sorted(set(parents) - needed)


def write_rows(parts: Mapping[str, Tensor], rows: Tensor, values: Mapping[str, Tensor]) -> None:
    """Applies a delta: writes `values`, of each part of a table, into its rows [n]."""
    for part, target in parts.items():
        target.index_copy_(0, rows.to(target.device), values[part].to(target.device))


# ---- the links of a chain in memory


@dataclass(frozen=True)
class Link:
    """A memory file: the state of `owner`, one of `ranks`, after `step`; whole, or what changed
    since the step `parent`."""

    ranks: int
    owner: int
    step: int
    parent: int | None

    def __str__(self) -> str:
        return f"the snapshot of rank {self.owner} after step {self.step}"

    @property
    def name(self) -> str:
        since = "whole" if self.parent is None else f"since-{self.parent}"
        return f"{self.ranks}/{self.owner}/{self.step}/{since}"

    @staticmethod
    def parse(name: str) -> Link | None:
        """None if it is not a name of ours."""
        try:
            ranks, owner, step, since = name.split("/")
            parent = None if since == "whole" else int(since.removeprefix("since-"))
            link = Link(int(ranks), int(owner), int(step), parent)
        except ValueError:
            return None
        return link if link.name == name and (parent is None or parent < link.step) else None


def parse_links(names: Iterable[str]) -> list[Link]:
    """By step, whole ones first; other names are left out."""
    links = [link for link in map(Link.parse, names) if link is not None]
    return sorted(links, key=lambda link: (link.step, link.parent is not None))


def find_chains(names: Names) -> dict[tuple[int, int], dict[int, tuple[Link, ...]]]:
    """(ranks, owner) -> step -> the memory files that make it up: a whole one, then changes. Steps
    with a missing file are left out; of two ways, the one with fewer files counts."""
    found: dict[tuple[int, int], dict[int, tuple[Link, ...]]] = {}
    for link in parse_links(names):
        chains = found.setdefault((link.ranks, link.owner), {})
        if link.parent is None:
            chains[link.step] = (link,)
        elif link.parent in chains and link.step not in chains:
            chains[link.step] = (*chains[link.parent], link)
    return {key: chains for key, chains in found.items() if chains}


def must_merge(sizes: Mapping[Link, int], chain: Sequence[Link], longest: int = 64) -> bool:
    """Whether the changes of a chain are as large as the state that they begin with, or too
    many."""
    base, *changes = chain
    return len(changes) >= longest or sum(sizes[link] for link in changes) > sizes[base]


# ---- which state a restart uses


@dataclass(frozen=True)
class Choice:
    """The snapshots that a restart uses."""

    step: int
    readers: tuple[int, ...]  # [ranks]: the rank that reads each one's from its machine's holder
    chains: tuple[tuple[Link, ...], ...]  # [ranks]


def choose_snapshots(
    held: Sequence[Names], machines: Sequence[bytes | str], refused: Sequence[int] = ()
) -> Choice | None:
    """The newest step that is complete for all ranks, on whichever machines, and not refused; None
    if there is none. held [ranks]: names of the memory files on the machine of each rank. A rank
    reads its own if its machine has it; otherwise the first rank of another machine does."""
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
    readers, chosen = [], []
    for owner in range(world):
        here = first[machines[owner]]
        order = [here, *(rank for rank in sorted(chains) if rank != here)]
        reader = next(rank for rank in order if step in chains[rank].get((world, owner), {}))
        readers.append(owner if reader == here else reader)
        chosen.append(chains[reader][world, owner][step])
    return Choice(step, tuple(readers), tuple(chosen))


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
    """[ranks]: the rank that keeps a copy of each rank's snapshots, one of the next machine. None
    if there is only one machine."""
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
