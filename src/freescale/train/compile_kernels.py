"""Compiles every GPU kernel that a run can need before its first step.

To find them, this module trains and evaluates a model of the same configuration with small tables
on a few tokens, and calls the operations of the tables, while launches are recorded instead of
executed. Kernels are not specialised on values that change from batch to batch, so these calls need
the same versions as all batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from freescale.batch import Jagged, Nested, SequenceBatch
from freescale.config import RunConfig
from freescale.data.batches.item_features import join_items
from freescale.data.batches.negatives import choose_log_q, choose_negatives
from freescale.data.batches.specs import Features
from freescale.embedding.dynamic.draws import DrawCounts
from freescale.embedding.dynamic_rules import After, Dynamic
from freescale.embedding.layout import TableSpec, choose_stride
from freescale.embedding.storage.api import TableRange, UpdateOptions
from freescale.embedding.storage.device import DeviceStorage
from freescale.kernels.dispatch.id_map import choose_draw_sums
from freescale.kernels.dispatch.requests import collision_masks, deduplicate, tag_rows
from freescale.kernels.dispatch.rows import (
    gather_rows,
    group_duplicates,
    read_rows,
    sum_by_row,
    sum_in_order,
)
from freescale.kernels.dispatch.versions import has_triton
from freescale.kernels.id_map import triton as triton_id_map
from freescale.kernels.id_map.triton_memory import Listed, Missing
from freescale.kernels.jit.compile import compile_recorded
from freescale.kernels.requests.reference import MarkedRows
from freescale.kernels.row_moves import triton as row_moves
from freescale.kernels.row_sums import triton as triton_row_sums
from freescale.kernels.row_sums.reference import SortedRows
from freescale.models.features import FeatureTables
from freescale.train.build import build_module, build_row_optimizer, parse_tables, size_tables

ITEMS, ACTIONS = 16, 4  # rows of the small tables
SAMPLES = 160
FAR = 2**31  # seconds: too long for times in 32 bits


def compile_kernels(
    config: RunConfig,
    precision: str,
    actions: bool,
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, all: None,
    features: Features | None = None,
) -> int:
    """Compiles and loads all kernels of a run on a GPU.

    Args:
        config: the run's settings.
        precision: the chosen precision.
        actions: whether the data has actions.
        device: the device of the run; on a CPU there is nothing to do.
        report: called with (compiled, total) at the start and after each kernel, unless all are in
            Triton's cache folder.
        features: of the data.

    Returns:
        The number of compiled kernels; the others were in the cache folder.
    """
    if device.type != "cuda" or not has_triton():
        return 0
    config = replace(config, train=replace(config.train, precision=precision))
    try:
        with torch.cuda.device(device):
            return compile_recorded(lambda: call_kernels(config, actions, device, features), report)
    except Exception as error:  # perhaps in a kernel that the data never needs
        warnings.warn(
            f"GPU kernels could not be compiled beforehand, a step waits for each: {error}",
            stacklevel=2,
        )
        return 0


def call_kernels(
    config: RunConfig, actions: bool, device: torch.device, features: Features | None = None
) -> None:
    """Calls everything that launches kernels in a run."""
    call_tables(config, device)
    sum_in_order(torch.zeros(2, ITEMS, device=device), copies=2)  # dense gradients
    for rules in parse_tables(config).values():
        if rules.maps_on_device:
            call_id_map(rules, config, device)
            call_draws(rules, device)
        call_row_exchange(config, device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # the run's own draws do not change
        # two layers: the first differs from the others, which are alike
        small = replace(config, model=replace(config.model, layers=min(2, config.model.layers)))
        tables = None if features is None else shrink_tables(features)
        module = build_module(small, ITEMS, ACTIONS if actions else 0, tables)
        named = ("item_features", "event_features", "user_features", "context_features")
        for name, rows in (("item", ITEMS), ("action", ACTIONS), *((n, ITEMS) for n in named)):
            if getattr(module, name) is not None:
                setattr(module, name, nn.Embedding(rows, config.model.width))
        module.to(device)
        for span in (1, FAR) if config.model.time_bias else (1,):
            batch = build_batch(config, actions, span)
            if tables is not None:
                batch = add_features(batch, tables, config.model.task)
            batch = batch.to(device)
            call_model(module, batch, config, device)
            if config.model.head == "dlrm":  # the sums over its events may also be short
                call_model(module, batch.slice(0, 2), config, device)
            if getattr(module, "capturable", False):  # padded batches have weights
                weights = torch.ones(batch.sequences["history"].values.shape[0], device=device)
                lengths = batch.sequences["history"].lengths
                padded = {**batch.sequences, "target_weights": Jagged(weights, lengths)}
                call_model(module, replace(batch, sequences=padded), config, device)


def shrink_tables(features: Features) -> FeatureTables:
    """Small tables of the same features."""
    vectors = [torch.zeros(ITEMS + 1, width).half() for width in features.vector_widths]
    return replace(size_tables(features), vectors=vectors)


def add_features(batch: SequenceBatch, tables: FeatureTables, task: str) -> SequenceBatch:
    """Adds what the model reads of features to a batch with the items that `build_batch` makes."""
    history = batch.sequences["history"]
    one = torch.ones_like(history.values)[:, None]
    requests = one.expand(-1, max(1, tables.context_places))
    sequences, dense = dict(batch.sequences), dict(batch.dense)
    if tables.event:
        sequences["event_features"] = replace(history, values=one)
    if tables.context:
        like = batch.sequences["labels"] if task == "ranking" else history
        sequences["context_features"] = replace(like, values=requests[: like.values.shape[0]])
    if tables.user:
        dense["user_features"] = torch.ones(len(batch), sum(tables.user_places)).long()
    batch = replace(batch, sequences=sequences, dense=dense)
    if not tables.item:
        return batch

    def find(ids: Tensor) -> dict[str, Tensor]:
        codes = torch.ones_like(ids)[..., None].expand(*ids.shape, max(1, tables.item_places))
        found = {"features": codes, "own": torch.ones(ids.shape)}
        return found | ({"vectors": ids} if tables.vectors else {})

    return join_items(batch, find)


def call_model(
    module: nn.Module, batch: SequenceBatch, config: RunConfig, device: torch.device
) -> None:
    """Calls the model as a training step and an evaluation do."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else None
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        losses: dict[str, Tensor] = module.train()(batch)
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    # evaluations run in the precision of the parameters, a first check in that of training
    for enabled in (False, dtype is not None):
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=enabled):
            module.eval()(batch)
            predict: Any = getattr(module, "encode_queries", getattr(module, "predict", None))
            predict(batch)


def list_wires(config: RunConfig) -> list[torch.dtype | None]:
    """The dtypes in which rows are gathered; None: their own."""
    return [None, *([torch.bfloat16] if config.train.wire_precision == "bf16" else [])]


def call_tables(config: RunConfig, device: torch.device) -> None:
    """Calls a table's operations in a step: unique ids, rows and their gradients, updates."""
    width, train = config.model.width, config.train
    weight = torch.zeros(ITEMS, width, device=device)
    numbers = torch.arange(2 * triton_row_sums.CHUNK, device=device) % ITEMS
    edges = torch.tensor([ITEMS], device=device)
    wires = list_wires(config)
    deduplicate(numbers, edges)
    collision_masks(numbers, numbers)
    tag_rows([MarkedRows(numbers > 0, numbers, [numbers.numel()], 1)])
    for wire in wires:
        for index in (numbers, numbers.to(torch.int32)):
            gather_rows(weight, index, wire)
        read = weight.to(wire or weight.dtype).requires_grad_()
        for count in (numbers.numel(), ITEMS):  # long sums go in chunks
            read_rows(read, numbers[:count]).sum().backward()  # type: ignore[no-untyped-call]
    gradients = torch.zeros(numbers.numel(), width, device=device)
    group_duplicates(numbers, gradients)(gradients)
    call_local_tables(numbers.to(torch.int32), weight, gradients)
    rows = TableRange(TableSpec("item", ITEMS, width, weight.dtype, ()), 0, 0, ITEMS)
    storage = DeviceStorage([rows], ITEMS, build_row_optimizer(config), device)
    if config.model.head == "dlrm" and train.precision == "bf16":  # rows are read in 16 bits
        call_narrow_reads(numbers, weight, gradients.bfloat16(), storage, train.row_clip)
    call_updates(storage, numbers, gradients, train.row_clip)
    if train.full_every > 1 or train.snapshot_every or train.deltas:  # rows are marked
        storage.changed.follow("consumer")
        call_updates(storage, numbers, gradients, train.row_clip)
    if "direct" in train.placement:
        for table in (weight, *storage.state.values()):
            row_moves.copy_rows(table, numbers[:ITEMS], table.clone(), numbers[:ITEMS])


def call_narrow_reads(
    numbers: Tensor, weight: Tensor, gradients: Tensor, storage: DeviceStorage, clip: float | None
) -> None:
    """Calls reads of a table in the gradients' dtype, and what becomes of these."""
    options: UpdateOptions = {"step": 1, "factor": 0.5, "clip": clip}
    for index in (numbers, numbers.to(torch.int32)):
        gather_rows(weight, index, gradients.dtype)
        for count in (numbers.numel(), ITEMS):  # long sums go in chunks
            given = gradients[:count], index[:count].to(torch.int32)
            sum_by_row(*given, ITEMS, dtype=weight.dtype)
            storage.update_readings(SortedRows.of(given[1]), given[0], **options)


def call_id_map(rules: Dynamic, config: RunConfig, device: torch.device) -> None:
    """Calls the operations of a dynamic table's map, for a batch and when it is loaded."""
    kernels = triton_id_map
    rows = min(rules.shard_rows, triton_id_map.HELD_ROWS + 1)  # larger shards launch the same
    held = kernels.allocate(ACTIONS, rows, 0, device, rules.shard_bits)
    keys = torch.arange(ITEMS, device=device)
    order = {"by_count": rules.evict == "lfu", "evicts": not isinstance(rules.evict, After)}
    kernels.rebuild(held)
    for counted in (None, torch.ones(ITEMS, dtype=torch.uint8, device=device)):
        looked = kernels.look_up(held, keys, counted, 0)
        kernels.swap_uses(held, looked.uses)
        listed = kernels.list_missing(held, keys, looked, counted)
        missing: Listed | Missing = listed
        if rules.shard_counters:
            ordered = kernels.order(held, listed)
            kernels.count_room(held, ordered, limit=0, evicts=order["evicts"])
            missing = replace(ordered, counts=ordered.wanted)
        new, came, sums = kernels.place(
            held, missing, batch=0, limit=0, host_sums=torch.zeros(3, dtype=torch.int64), **order
        )
        for known in ((sums, came), ()):
            kernels.swap_contents(held, new, *known)
        kernels.find_again(held, keys, looked)
    kernels.find(held, keys)
    weight = torch.zeros(ITEMS, config.model.width, device=device)
    for wire in list_wires(config):
        kernels.read_rows(held, keys, weight, 0, wire)


def call_draws(rules: Dynamic, device: torch.device) -> None:
    """Calls the operations of a dynamic table for log-q."""
    kernels, keys = choose_draw_sums(device), torch.zeros(1, dtype=torch.int64, device=device)
    sums = DrawCounts(rules, 0, 1, device).sums
    for back in (False, True):
        kernels.add_draws(sums, keys, keys, 0, take_back=back)
    kernels.estimate_log(sums, keys, 0)


def call_row_exchange(config: RunConfig, device: torch.device) -> None:
    """Calls the operations of a dynamic table on inserted and evicted rows and their state."""
    weight = torch.zeros(ITEMS, config.model.width, device=device)
    keys = torch.arange(ITEMS, device=device)
    shapes = build_row_optimizer(config).state_shapes(config.model.width).values()
    states = [torch.zeros(ITEMS, *shape, device=device) for shape in shapes]
    narrow = next((state for state in states if state.dim() == 1), None)
    for total in (keys, None):
        kept, _ = row_moves.insert_drawn(
            weight, keys, keys, keys[:1], 0.5, state=narrow, total=total
        )
        for state in states:
            if state is not narrow:
                row_moves.insert_zeros(state, keys, total=total)
    row_moves.swap_rows(weight, keys, kept)
    for state in states:
        row_moves.swap_rows(state, keys, torch.zeros_like(state[: keys.numel()]))


def call_local_tables(numbers: Tensor, weight: Tensor, gradients: Tensor) -> None:
    """Calls a table's operations on a single rank: rows are read in place, gradients summed by
    row."""
    ids = numbers.long()
    triton_row_sums.spread_ids(ids, numbers, choose_stride(ITEMS), ITEMS, 0)
    deduplicate(numbers, ids[:0])
    for count in (numbers.numel(), ITEMS):  # long sums go in chunks
        sum_by_row(gradients[:count], numbers[:count], ITEMS)
        sum_by_row(gradients[:count], numbers[:count], ITEMS, onto=torch.zeros_like(weight[:ITEMS]))


def call_updates(
    storage: DeviceStorage, numbers: Tensor, gradients: Tensor, clip: float | None
) -> None:
    """Calls updates by sums of other ranks, and by those of a single one."""
    fewer = numbers.to(torch.int32)
    for step in (1, 10**9):  # Adam's correction is computed in two ways
        options: UpdateOptions = {"step": step, "factor": 0.5, "clip": clip}
        for rows in (numbers, fewer):  # from other ranks; from a copy on one rank
            storage.update(rows, gradients, **options)
        for count in (numbers.numel(), ITEMS):  # long sums go in chunks
            storage.update_readings(SortedRows.of(fewer[:count]), gradients[:count], **options)


def build_batch(config: RunConfig, actions: bool, span: int) -> SequenceBatch:
    """Builds a few samples with everything that the model may read, their times `span` seconds
    apart: enough for sums in chunks."""
    lengths = torch.ones(SAMPLES, dtype=torch.int64)
    lengths[0] = min(3, config.data.max_length)
    counts = torch.ones(SAMPLES, dtype=torch.int64)
    numbers = torch.arange(int(lengths.sum()))
    sequences = {
        "history": Jagged(numbers % ITEMS, lengths),
        "timestamps": Jagged(numbers * span, lengths),
    }
    if actions:
        sequences["actions"] = Jagged(numbers % ACTIONS, lengths)
    nested, dense, shared = {}, {}, {}
    if config.model.task == "ranking":
        items = torch.arange(SAMPLES)
        labels = torch.zeros(SAMPLES, len(config.label_names))
        sequences["labels"] = Jagged(labels, counts)
        sequences["candidate_timestamps"] = Jagged(items * span, counts)
        nested["candidates"] = Nested(items % ITEMS, torch.ones_like(items), counts)
    else:
        sequences["targets"] = Jagged(numbers % ITEMS, lengths)
        data = config.data
        negatives = torch.arange(choose_negatives(data.negatives, data.negatives_per)) % ITEMS
        columns = {"negatives": negatives}
        if choose_log_q(data.log_q, data.negatives_from, data.in_batch_share):
            columns["negatives_log_q"] = torch.zeros(len(negatives))
            sequences["targets_log_q"] = Jagged(torch.zeros(len(numbers)), lengths)
        for name, column in columns.items():
            if data.negatives_per == "position":
                sequences[name] = Jagged(column.repeat(len(numbers), 1), lengths)
            elif data.negatives_per == "batch":
                shared[name] = column
            else:
                dense[name] = column.repeat(SAMPLES, 1)
    return SequenceBatch(sequences, nested, dense, keys=torch.arange(SAMPLES), shared=shared)
