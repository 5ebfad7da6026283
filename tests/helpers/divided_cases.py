"""Trains on batches with long histories that several ranks divide."""

from __future__ import annotations

from dataclasses import replace

import torch

import freescale
from freescale.balance.balancer import Balancer
from freescale.balance.cost import CostModel
from freescale.balance.division import cut_samples, divide, order_parts
from freescale.balance.shuffle import measure_samples
from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.models.features import FeatureTables
from freescale.models.heads import Ranking, Retrieval
from freescale.models.hstu import HSTU
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.local import LocalTransport
from helpers.dynamic_streams import list_local_rows
from helpers.training import snapshot

ITEMS, ACTIONS, FEATURES = 40, 5, 9
COST = CostModel.balanced_at(8)
TASKS = ("click", "like")


def make_batch(lengths: list[int], task: str, seed: int, features: bool = False) -> SequenceBatch:
    """Users of these history lengths, in one global batch."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths)
    events, users = int(sizes.sum()), len(lengths)

    def draw_ids(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=draw)

    gaps = draw_ids(4000, events) * (draw_ids(3, events) > 0)
    sequences = {
        "history": Jagged(draw_ids(ITEMS, events), sizes),
        "actions": Jagged(draw_ids(ACTIONS, events), sizes),
        "timestamps": Jagged(gaps.cumsum(0), sizes),
    }
    dense, candidates = {}, {}
    if features:
        sequences["event_features"] = Jagged(draw_ids(FEATURES, events, 2), sizes)
        dense["user_features"] = draw_ids(FEATURES, users, 2)
    if task == "retrieval":
        sequences["targets"] = Jagged(draw_ids(ITEMS, events), sizes)
        dense["negatives"] = draw_ids(ITEMS, users, 6)
        weights = {"next_item": sizes.double()}
    else:
        counts = draw_ids(3, users) + 1
        offered = int(counts.sum())
        values = draw_ids(ITEMS, offered)
        candidates["candidates"] = Nested(values, torch.ones_like(values), counts)
        labels = draw_ids(2, offered, len(TASKS)).double()
        sequences["labels"] = Jagged(labels, counts)
        weights = {task: counts.double() for task in TASKS}
    keys = torch.arange(users) + 1000 * seed
    return SequenceBatch(sequences, candidates, dense, weights, keys, number=seed)


def build_model(task: str, features: bool = False, recompute: bool = False, **options):
    """Its tables are on the meta device, unless `table_device` is given."""
    torch.manual_seed(0)
    device = options.pop("table_device", "meta")
    sizes = {"width": 8, "layers": 2, "heads": 2, "max_length": 600, "dropout": 0.2} | options
    encoder = HSTU(**sizes, checkpoint=recompute)
    tables = FeatureTables(event=FEATURES, user=FEATURES, user_places=(1, 1))
    named = {"num_items": ITEMS, "num_actions": ACTIONS, "table_device": device}
    if features:
        named["feature_tables"] = tables
    if task == "retrieval":
        return Retrieval(encoder, **named)
    return Ranking(encoder, tasks=TASKS, **named)


def read_slice(batch: SequenceBatch, rank: int, world: int) -> SequenceBatch:
    edges = [len(batch) * place // world for place in range(world + 1)]
    return replace(batch.slice(edges[rank], edges[rank + 1]), number=batch.number)


def train_divided(
    transport, batches, task="retrieval", split="off", save=None, resume=None, **given
):
    """(losses, tables and weights, this rank's parts by step, its ledger) after training. Of
    dynamic tables, and unless it `gathers`, the rows of this rank. `save`: (folder, step);
    `resume`: the folder, where the batches after that step follow."""
    names = ("schedule", "accumulate", "precision", "dense_sums")
    pipeline_options = {name: given.pop(name) for name in names if name in given}
    tables = {name: given.pop(name) for name in ("tables", "placement") if name in given}
    dtype, gathers = given.pop("dtype", torch.float64), given.pop("gathers", True)
    module = build_model(task, **given).to(dtype)
    parallel = freescale.parallelize(
        module,
        module.features,
        freescale.Adagrad(lr=0.1),
        transport=transport,
        init_std=0.3,
        **({"placement": "sharded"} | tables),
    )
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    balancer = Balancer("greedy", COST, split_histories=split)
    pipeline = freescale.Pipeline(parallel, optimizer, balance=balancer, **pipeline_options)
    slices = [read_slice(batch, transport.rank, transport.world) for batch in batches]
    if resume is not None:
        checkpoints = Checkpoints(resume, transport)
        progress = checkpoints.load(checkpoints.latest(), parallel, optimizer)
        pipeline.load_state_dict(progress["pipeline"])
    losses = []
    for result in pipeline.run(slices[pipeline.steps :]):
        losses.append(float(result.loss))
        if save is not None and result.step == save[1]:
            progress = {"step": result.step, "pipeline": pipeline.state_dict()}
            Checkpoints(save[0], transport).save(parallel, optimizer, progress)
    pipeline.flush()
    records = parallel.tables.transport.ledger.drain()
    parts = [int(record["counters"].get("split_parts", 0)) for record in records]
    if not gathers:
        state = dict(parallel.tables.get_group("item").rows.get_tensors("item"))
        state |= {n: p.detach().clone() for n, p in parallel.module.named_parameters()}
    elif tables.get("tables"):
        state = dict(zip(("ids", "held"), list_local_rows(parallel), strict=True))
        state |= {n: p.detach().clone() for n, p in parallel.module.named_parameters()}
    else:
        state = snapshot(parallel)
    pipeline.close()
    return losses, state, parts, records


def divide_here(batch: SequenceBatch, count: int, log=None) -> SequenceBatch:
    """A batch whose longest history is divided into parts that all stay on this rank."""
    division = divide(measure_samples(batch, "history"), COST, 9, count)
    events = division.stop - division.start
    pieces = cut_samples(batch, division.sample, events, "history")
    pieces = order_parts(pieces, division, division.sample * 0, 0, 1)
    log = [] if log is None else log

    def exchange(rows, back):
        log.append(f"send {'gradients' if back else 'keys'}")
        return lambda: log.append("wait") or rows

    return replace(pieces, divided=replace(pieces.divided, exchange=exchange))


def differentiate(module, batch: SequenceBatch) -> dict[str, torch.Tensor]:
    module.zero_grad()
    losses = module(batch)
    sum(losses.values()).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters()} | {
        name: loss.detach() for name, loss in losses.items()
    }


def train_alone(*arguments, **options):
    return train_divided(LocalTransport(), *arguments, **options)
