"""The memory files that a rank keeps at the snapshot holder of its machine: its own chain, and
those of the ranks whose buddy it is."""

from __future__ import annotations

from collections.abc import Collection

from freescale.train.state.choice import Link, must_merge
from freescale.train.state.holder_link import HolderLink
from freescale.train.state.memory_chain import merge_chain
from freescale.train.state.segment import Segment


class HeldChains:
    """Chains by owner. Next to each, what was there before it stays until the next snapshot is
    complete: two states can be restored at any time."""

    def __init__(self, run: str, link: HolderLink) -> None:
        self._run, self.link = run, link
        self._chains: dict[int, list[Link]] = {}
        self._sizes: dict[Link, int] = {}
        self._before: dict[int, set[str]] = {}  # names that go with the next one

    def find_last(self, owner: int) -> Link | None:
        """The end of a chain, which the next snapshot may hold the changes since."""
        chain = self._chains.get(owner)
        return chain[-1] if chain else None

    def keep(self, link: Link, segment: Segment) -> None:
        """Hands a memory file to the holder. OSError if that has ended."""
        self.link.put(link.name, segment.file)
        self._sizes[link] = segment.size

    def complete(self, links: Collection[Link]) -> None:
        """Once these are kept on all ranks: what they have made superfluous goes, and chains that
        have grown long become one memory file."""
        names = self.link.list()
        for link in links:
            owner, expired = link.owner, self._before.pop(link.owner, set())
            if link.parent is None:
                self._chains[owner] = []
                self._before[owner] = {
                    name for name in _select(names, owner) if name not in expired | {link.name}
                }
            self._chains[owner].append(link)
            self.link.drop(sorted(expired))
            if must_merge(self._sizes, self._chains[owner]):
                self._merge(owner)

    def drop_others(self, owners: Collection[int], ranks: int) -> None:
        """Of all ranks that nobody on this machine answers for."""
        links = [Link.parse(name) for name in self.link.list()]
        self.link.drop(
            [
                link.name
                for link in links
                if link is not None and (link.ranks != ranks or link.owner not in owners)
            ]
        )

    def forget(self) -> None:
        """The next snapshots are whole."""
        self._chains.clear()
        self._sizes.clear()
        self._before.clear()

    def _merge(self, owner: int) -> None:
        chain = self._chains[owner]
        segments = [open_link(self.link, link) for link in chain]
        try:
            whole, segment = merge_chain(self._run, chain, segments)
            self.keep(whole, segment)
            segment.close()
        finally:
            for each in segments:
                each.close()
        self._before[owner] = {link.name for link in chain}
        for link in chain:
            self._sizes.pop(link)
        self._chains[owner] = [whole]


def open_link(holder: HolderLink, link: Link) -> Segment:
    """A memory file. OSError if the holder does not have it, Damaged if it is half written."""
    file = holder.get(link.name)
    if file is None:
        raise OSError(f"the holder has no {link.name}")
    return Segment.open(file, f"the snapshot of rank {link.owner} after step {link.step}")


def _select(names: Collection[str], owner: int) -> list[str]:
    links = [Link.parse(name) for name in names]
    return [link.name for link in links if link is not None and link.owner == owner]
