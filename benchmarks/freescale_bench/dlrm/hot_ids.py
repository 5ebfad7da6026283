"""Memory and traffic of ranks when one album is in 30 % of the events, against uniform ids.

Rows are sharded by id, so all reads of the album, of its artist and of its tracks go to the ranks
that own these few rows. A rank asks for each row once a step, however often its batch reads it:
the owner serves as many rows as there are ranks. Both arms have batches of the same sizes, and each
arm runs in new processes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import freescale
from freescale.batch import Jagged, SequenceBatch
from freescale.embedding.groups.sharded import Sharded
from freescale.embedding.layout import ShardLayout, find_feature_ids
from freescale.embedding.sharded_model import ShardedModel
from freescale.ledger.record import KINDS
from freescale.pipeline.dense.local import AdamW
from freescale.pipeline.pipeline import Pipeline
from freescale.transport.api import Transport
from freescale_bench.common.ranks import gather_json, open_rank, start_ranks
from freescale_bench.common.results import Destination, Row, Target, make_claims, write
from freescale_bench.common.turns import read_peak_memory, read_resident_memory
from freescale_bench.dlrm.measure import ADAM
from freescale_bench.dlrm.shapes import SMALL, Shape, build_model, make_batch

ARMS = {"uniform": 0.0, "hot album": 0.3}  # shares of the events
RANKS, STEPS, LIMIT = 4, 8, 600.0
TRACKS = 12  # of the album
_ITEM_HOUR, _ARTIST_HOUR = 4, 5  # places in the context
EMBEDDING = ("ids", "rows", "gradients")  # kinds of traffic
# narrow networks: most memory of a step is that of rows
SHAPE = Shape(
    "dlrm_v4_hstu, narrow", 128, 2, 1, longest=512, positions=1024, hidden=32,
    rows=(400_000, 50_000, 140_000), context=(10_000, *(40_000,) * 7),
)  # fmt: skip
SAMPLES = 32  # of a rank
_TEXT = "one album in 30 % of the events: {} of the worst rank, over uniform ids"
TARGETS = [
    Target(figure, _TEXT.format(text), 1.1, "x", at_least=False)
    for figure, text in {
        "memory": "peak memory of the steps",
        "sent": "bytes sent",
        "received": "bytes received",
    }.items()
]


@dataclass(frozen=True)
class Sizes:
    shape: Shape
    samples: int
    steps: int

    @staticmethod
    def choose(trial: bool) -> Sizes:
        return Sizes(replace(SMALL, hidden=32), 4, 3) if trial else Sizes(SHAPE, SAMPLES, STEPS)


def bench_hot_ids(trial: bool, to: Destination) -> int:
    """Starts the ranks of each arm. Returns their exit status."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for arm in ARMS:
            output = Path(temporary) / "row.json"
            words = ["hot-ids", "--arm", arm, "--output", str(output)]
            words += ["--trial"] if trial else []
            if status := start_ranks("dlrm", words, RANKS, "cpu", LIMIT, threads=1):
                return status
            rows.append(json.loads(output.read_text(encoding="utf-8")))
            print(rows[-1], flush=True)
    if not trial:
        claims = make_claims(TARGETS, compare(rows))
        write(
            "dlrm-hot-ids", f"{RANKS}ranks-cpu", "freescale bench dlrm hot-ids", rows, claims, to=to
        )
    return 0


def compare(rows: Sequence[Row]) -> Mapping[str, float]:
    """The worst rank with the hot album, over the worst one with uniform ids."""
    uniform, hot = rows
    names = {"memory": "step_memory_bytes", "sent": "bytes_sent", "received": "bytes_received"}
    return {name: max(hot[column]) / max(uniform[column]) for name, column in names.items()}


def measure_rank(arm: str, trial: bool, output: Path) -> None:
    """Measures an arm as one of the ranks. Rank 0 writes its row."""
    sizes = Sizes.choose(trial)
    with open_rank("cpu", LIMIT) as (transport, _):
        mine = _measure(sizes, ARMS[arm], transport)
        ranks = gather_json(transport, mine)
    if transport.rank == 0:
        row: Row = {"arm": arm, "ranks": len(ranks), "tokens": ranks[0].pop("tokens")}
        row |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
        reads = np.sum(row.pop("reads"), axis=0)
        row["reads_of_each_ranks_rows"] = reads.tolist()
        output.write_text(json.dumps(row), encoding="utf-8")


def make_batches(sizes: Sizes, share: float, rank: int, world: int) -> Iterator[SequenceBatch]:
    """Batches of uniform ids, then with an album in a share of the events."""
    lengths = np.full(sizes.samples, sizes.shape.longest)
    for step in range(sizes.steps + 1):
        seed = step * world + rank
        batch = make_batch(sizes.shape, lengths, seed, skew=1.0)
        yield heat(batch, sizes.shape, share, seed)


def heat(batch: SequenceBatch, shape: Shape, share: float, seed: int) -> SequenceBatch:
    """Replaces a share of the tracks by those of one album, with its artist and with their
    crosses."""
    random = torch.Generator().manual_seed(seed)
    artist, album = shape.rows[1] // 2, shape.rows[2] // 2  # whichever
    firsts = np.cumsum([0, *shape.context])

    def draw(count: int) -> Tensor:
        return torch.randint(0, TRACKS, (count,), generator=random)

    columns = dict(batch.sequences)
    offered = batch.candidates["candidates"]
    for name, ids in (("history", batch.values("history")), ("candidates", offered.values)):
        chosen = torch.rand(len(ids), generator=random) < share
        tracks = draw(len(ids))
        own, features = torch.where(chosen, tracks, ids), columns[f"{name}_features"]
        hot = torch.tensor([artist, shape.rows[1] + album])
        described = torch.where(chosen[:, None], hot, features.values)
        columns[f"{name}_features"] = Jagged(described, features.lengths)
        if name == "history":
            columns[name] = Jagged(own, features.lengths)
            continue
        offered, context = replace(offered, values=own), columns["context_features"]
        hours = torch.randint(0, 24, (len(ids),), generator=random)
        places = context.values.clone()
        for place, cross in ((_ITEM_HOUR, 24 * tracks + hours), (_ARTIST_HOUR, hours)):
            codes = int(firsts[place]) + cross % shape.context[place]
            places[chosen, place] = codes[chosen]
        columns["context_features"] = Jagged(places, context.lengths)
    return replace(batch, sequences=columns, candidates={"candidates": offered}).check()


def _measure(sizes: Sizes, share: float, transport: Transport) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build_model(sizes.shape, table_device="meta")
    sharded = freescale.parallelize(
        model, model.features, freescale.RowWiseAdagrad(lr=1e-6, eps=1e-8), transport=transport,
        init_std=0.02, placement="sharded",
    )  # fmt: skip
    sharded.tables.place()
    pipeline = Pipeline(
        sharded, AdamW(sharded.dense_parameters(), weight_decay=0.0, **ADAM), clip=1.0,
        precision="fp32",
    )  # fmt: skip
    batches = list(make_batches(sizes, share, transport.rank, transport.world))
    reads = np.sum([_count_reads(sharded, batch) for batch in batches], axis=0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = read_resident_memory()
    for _ in pipeline.run(batches):
        pass
    pipeline.flush()
    memory = read_peak_memory() - before
    records = pipeline.ledger.drain()[1:]  # the first one has no step before it
    found: dict[str, Any] = {"tokens": sizes.samples * sizes.shape.tokens, "reads": reads.tolist()}
    found |= {"step_memory_bytes": memory, **_sum_bytes(records)}
    pipeline.close()
    return found


def _sum_bytes(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes of a step that this rank exchanges for its tables, on average."""
    sums = {"bytes_sent": dict.fromkeys(KINDS, 0), "bytes_received": dict.fromkeys(KINDS, 0)}
    for kind, sent, received, *_ in (each for of in records for each in of["collectives"]):
        sums["bytes_sent"][kind] += sent
        sums["bytes_received"][kind] += received
    return {
        name: sum(by_kind[kind] for kind in EMBEDDING) / len(records)
        for name, by_kind in sums.items()
    }


def _count_reads(sharded: ShardedModel, batch: SequenceBatch) -> np.ndarray[Any, Any]:
    """[ranks]: how often a batch reads rows of each rank; without deduplication, rows that it would
    ask for."""
    found = np.zeros(sharded.transport.world, np.int64)
    for group in sharded.tables.groups:
        assert isinstance(group, Sharded) and isinstance(group.layout, ShardLayout)
        for table, spec in enumerate(group.layout.specs):
            for _, ids in find_feature_ids(batch, spec):
                owners = group.layout.compute_keys(table, ids.reshape(-1)) // group.layout.size
                found += np.bincount(owners.numpy(), minlength=len(found))
    return found
