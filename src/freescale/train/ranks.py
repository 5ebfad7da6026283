"""Ranks of the targets user by user, for comparisons of models on the same users."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HEAD = "user_id,history,rank,rank_unseen"


@dataclass
class SampleRanks:
    """What `evaluate_retrieval` finds of each sample, in the order of the data, the same on every
    rank."""

    there: list[Tensor] = field(default_factory=list)  # [samples] each: 1 with a target, else 0
    history: list[Tensor] = field(default_factory=list)  # [q] each: events, of those with a target
    ranks: list[Tensor] = field(default_factory=list)  # [2, q] each: among all, among the unseen


def write_ranks(path: Path, histories: Path, found: SampleRanks) -> None:
    """Writes a CSV file, a line for each user with a target: user_id, the events of the history
    that the model saw, and the rank of the target among all items and among those that the history
    does not hold.

    Args:
        path: of the CSV file.
        histories: the file whose users were evaluated, in its order.
        found: of all of them.
    """
    import pyarrow.parquet as pq

    users = pq.read_table(histories, columns=["user_id"]).column("user_id").to_numpy()
    there = torch.cat(found.there).cpu().numpy() > 0
    if len(there) != len(users):
        raise ValueError(f"{len(there)} samples were evaluated, {histories} has {len(users)} users")
    columns = torch.cat(found.history).cpu().numpy(), *torch.cat(found.ranks, 1).cpu().numpy()
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(
        temporary,
        np.stack([users[there], *columns], 1),
        fmt="%d",
        delimiter=",",
        header=HEAD,
        comments="",
    )
    temporary.replace(path)
