"""Chains of memory files: a whole state of a rank, and changes that follow it.

Changes are applied to the whole state where that is needed: into a model, at a restart, or into
another file, which then is the whole state, when the changes have become as large as that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from freescale.train.state.choice import Link
from freescale.train.state.files import Damaged
from freescale.train.state.segment import Segment, write_segment


def label_link(link: Link) -> str:
    """For messages."""
    return f"the snapshot of rank {link.owner} after step {link.step}"


def check_link(segment: Segment, link: Link, run: str) -> None:
    """Damaged if a memory file is not what its name says, or another run's."""
    header, label = segment.header, label_link(link)
    if header.get("run") != run:
        raise Damaged(f"{label} is another run's")
    found = [header.get(key) for key in ("ranks", "rank", "step", "parent")]
    if found != [link.ranks, link.owner, link.step, link.parent]:
        ranks, owner, step, parent = found
        raise Damaged(
            f"{label} holds another state: of rank {owner} of {ranks} after step {step}, since "
            f"{parent}"
        )


def describe_segment(run: str, link: Link, state: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a memory file."""
    about = {"run": run, "ranks": link.ranks, "rank": link.owner}
    return about | {"step": link.step, "parent": link.parent, "state": dict(state)}


def apply_changes(
    tables: Mapping[str, Mapping[str, Tensor]], tensors: Mapping[str, Tensor]
) -> None:
    """Writes the changed rows of a memory file into tables (by name, then part) of this rank."""
    for name, parts in tables.items():
        positions = tensors.get(f"changed/{name}/positions")
        if positions is None:
            continue
        local = positions.long()
        for part, value in parts.items():
            changed = tensors[f"changed/{name}/{part}"].to(value.device)
            value.index_copy_(0, local.to(value.device), changed)


def group_tables(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tables of a whole state, by name and part."""
    tables: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "table":
            name, _, part = rest.rpartition("/")
            tables.setdefault(name, {})[part] = value
    return tables


def merge_chain(
    run: str, chain: Sequence[Link], segments: Sequence[Segment]
) -> tuple[Link, Segment]:
    """A whole state that equals the end of the chain."""
    last = chain[-1]
    read = [segment.read() for segment in segments]
    kept = {name: value for name, value in read[0].items() if name.startswith("table/")}
    newest = {
        name: value
        for name, value in read[-1].items()
        if name.startswith(("rest/", "marks/", "shards/"))
    }
    whole = Link(last.ranks, last.owner, last.step, None)

    def amend(written: dict[str, Tensor]) -> None:
        tables = group_tables(written)
        for tensors in read[1:]:
            apply_changes(tables, tensors)

    with torch.no_grad():
        header = describe_segment(run, whole, segments[-1].header["state"])
        return whole, write_segment(header, kept | newest, amend)
