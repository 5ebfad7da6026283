"""The chains of memory files at the snapshot holder of a machine: a rank's own, and those of the
ranks whose buddy it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import Tensor

from freescale.train.state.chain import (
    Damaged,
    Link,
    find_chains,
    find_expired,
    must_merge,
    parse_links,
    write_rows,
)
from freescale.train.state.contents import group_tables
from freescale.train.state.holder_link import HolderLink
from freescale.train.state.memory import Segment, write_segment

_KEPT = 2  # complete states of each rank that can be restored at any time


class HeldChains:
    """Chains by owner. What a complete snapshot makes superfluous goes, and long chains become one
    memory file."""

    def __init__(self, run: str, link: HolderLink) -> None:
        self._run, self.link = run, link
        self._last: dict[int, Link] = {}  # the end of each owner's chain in this attempt
        self._sizes: dict[Link, int] = {}

    def find_last(self, owner: int) -> Link | None:
        """The end of a chain; the next snapshot may hold the changes since."""
        return self._last.get(owner)

    def keep(self, link: Link, segment: Segment) -> None:
        """Hands a memory file to the holder. OSError if that has ended."""
        self.link.put(link.name, segment.file)
        self._sizes[link] = segment.size

    def complete(self, links: Collection[Link]) -> None:
        """Removes what has expired, once these are kept on all ranks, and merges long chains."""
        names = self.link.list()
        for link in links:
            key = link.ranks, link.owner
            here = [each for each in parse_links(names) if (each.ranks, each.owner) == key]
            parents: dict[int, int | None] = {}
            for each in here:
                parents.setdefault(each.step, each.parent)  # a merged chain before its last link
            expired = find_expired(parents, link.step, _KEPT)
            self._drop([e for e in here if e.step in expired or e.parent != parents[e.step]])
            self._last[link.owner] = link
            chain = find_chains(names)[key][link.step]
            if must_merge(self._sizes, chain):
                self._merge(chain)

    def drop_others(self, owners: Collection[int], ranks: int) -> None:
        """Removes those of ranks that nobody on this machine answers for."""
        links = parse_links(self.link.list())
        self._drop([link for link in links if link.ranks != ranks or link.owner not in owners])

    def give_up_after(self, step: int) -> None:
        """Removes later states: the run did not continue from them."""
        self._drop([link for link in parse_links(self.link.list()) if link.step > step])

    def forget(self) -> None:
        """The next snapshots are whole."""
        self._last.clear()

    def _drop(self, links: Collection[Link]) -> None:
        self.link.drop([link.name for link in links])
        for link in links:
            self._sizes.pop(link, None)

    def _merge(self, chain: Sequence[Link]) -> None:
        with ExitStack() as stack:
            segments = [stack.enter_context(closing(open_link(self.link, e))) for e in chain]
            whole, segment = merge_chain(self._run, chain, segments)
            self.keep(whole, stack.enter_context(closing(segment)))


def open_link(holder: HolderLink, link: Link) -> Segment:
    """Opens a memory file. OSError if the holder does not have it, Damaged if it is half
    written."""
    file = holder.get(link.name)
    if file is None:
        raise OSError(f"the holder has no {link.name}")
    return Segment.open(file, str(link))


# ---- memory files of a chain


def describe_segment(run: str, link: Link, state: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a memory file."""
    about = {"run": run, "ranks": link.ranks, "rank": link.owner}
    return about | {"step": link.step, "parent": link.parent, "state": dict(state)}


def check_link(segment: Segment, link: Link, run: str) -> None:
    """Damaged if a memory file is not what its name promises, or another run's."""
    header = segment.header
    if header.get("run") != run:
        raise Damaged(f"{link} is another run's")
    found = [header.get(key) for key in ("ranks", "rank", "step", "parent")]
    if found != [link.ranks, link.owner, link.step, link.parent]:
        ranks, owner, step, parent = found
        raise Damaged(
            f"{link} holds another state: of rank {owner} of {ranks} after step {step}, since "
            f"{parent}"
        )


def apply_changes(
    tables: Mapping[str, Mapping[str, Tensor]], tensors: Mapping[str, Tensor]
) -> None:
    """Writes the changed rows of a memory file into tables (by name, then part) of this rank."""
    for name, parts in tables.items():
        positions = tensors.get(f"changed/{name}/positions")
        if positions is not None:
            values = {part: tensors[f"changed/{name}/{part}"] for part in parts}
            write_rows(parts, positions.long(), values)


def merge_chain(
    run: str, chain: Sequence[Link], segments: Sequence[Segment]
) -> tuple[Link, Segment]:
    """A whole state that equals the end of the chain."""
    first, *changes = [segment.read() for segment in segments]
    last = chain[-1]
    tables = {name: value for name, value in first.items() if name.startswith("table/")}
    rest = {name: of for name, of in changes[-1].items() if not name.startswith("changed/")}
    whole = Link(last.ranks, last.owner, last.step, None)

    def amend(written: dict[str, Tensor]) -> None:
        for tensors in changes:
            apply_changes(group_tables(written), tensors)

    with torch.no_grad():
        header = describe_segment(run, whole, segments[-1].header["state"])
        return whole, write_segment(header, tables | rest, amend)
