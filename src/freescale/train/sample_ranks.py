"""The rank of each user's target, to compare models on the same users."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HEAD = ("user_id", "history", "rank", "rank_unseen", "item_id")


@dataclass
class SampleRanks:
    """The results of `evaluate_retrieval` for each sample, in the order of the data; the same on
    every rank."""

    there: list[Tensor] = field(default_factory=list)  # [samples] each: 1 with a target, else 0
    history: list[Tensor] = field(default_factory=list)  # [q] each: events, of those with a target
    targets: list[Tensor] = field(default_factory=list)  # [q] each: item ids
    ranks: list[Tensor] = field(default_factory=list)  # [2, q] each: among all, the unseen; or MISS
    rows: NDArray[np.int64] | None = None  # [samples] of the histories file; None: in its order


def write_ranks(
    path: Path, histories: Path, found: SampleRanks, vocabulary: Path | None = None
) -> None:
    """Writes a CSV file with a line for each user with a target: user_id, the events of the history
    that the model saw, the target's rank among all items and among the unseen ones, and the target.
    The ranks are empty if the table has no row for the target.

    Args:
        path: the CSV file.
        histories: the file whose users were evaluated.
        found: the results of all users.
        vocabulary: restores the ids of the source. None writes the ids of `histories`.
    """
    import pyarrow.parquet as pq

    from freescale.data.ingest.ids import restore_ids

    users = pq.read_table(histories, columns=["user_id"]).column("user_id").to_numpy()
    users = users if found.rows is None else users[found.rows]
    there = torch.cat(found.there).cpu().numpy() > 0
    if len(there) != len(users):
        raise ValueError(f"{len(there)} samples were evaluated, {histories} has {len(users)} users")
    columns = (
        restore_ids(vocabulary, "user_id", users[there].tolist()),
        torch.cat(found.history).tolist(),
        *([rank or "" for rank in kind] for kind in torch.cat(found.ranks, 1).tolist()),
        restore_ids(vocabulary, "item_id", torch.cat(found.targets).tolist()),
    )
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEAD)
        writer.writerows(zip(*columns, strict=True))
    temporary.replace(path)
