"""One new event for each of several users, on a GPU: all layers of all users in one CUDA graph.

Launches are what a single event costs. What differs between two calls, addresses of the states
among it, goes to the device in one copy; everything from the embedding to the query then follows
from memory at fixed addresses. Graphs are kept by model and number of users, rounded up to a power
of two. The first call of a size launches kernel by kernel: rare sizes need no graph, and nothing
is compiled or loaded while a graph is captured. `layers` computes the same, and everything else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from freescale.kernels.attention import triton_decode
from freescale.kernels.attention.plan_columns import NewEventColumn
from freescale.kernels.attention.triton_plan import find_bucket_edges
from freescale.kernels.dispatch.versions import runs_triton
from freescale.kernels.jit.launch import round_up_to_power_of_two, use_device
from freescale.models.columns import is_plain
from freescale.models.heads import Retrieval
from freescale.models.hstu import HSTU
from freescale.models.hstu_layer import EPS, HSTULayer
from freescale.models.incremental.layers import embed_events
from freescale.models.incremental.state import HistoryState
from freescale.packed import Packed
from freescale.streams import current_stream, record_event_on
from freescale.visible import Visible

Columns = dict[str, Tensor]  # each [users, ...]


def fits(model: Retrieval, states: Sequence[HistoryState], columns: Columns) -> bool:
    """Whether `append_one` takes new events of these columns."""
    encoder = model.encoder
    device, dtype = encoder.position.device, encoder.position.dtype
    if not runs_triton(device) or type(encoder) is not HSTU:
        return False
    tables = model.item, model.action, model.item_features, model.event_features
    return (
        triton_decode.fits(encoder.heads * encoder.widths[1], encoder.widths, dtype)
        and not torch.is_autocast_enabled(device.type)
        and all(t is None or (type(t) is nn.Embedding and is_plain(t)) for t in tables)
        and all(_is_alike(columns, state.columns) for state in states)
    )


def _is_alike(columns: Columns, kept: Columns) -> bool:
    """Whether events on the host can be written to the columns of a state as they are."""
    return all(
        new.is_cpu
        and new.dtype is kept[name].dtype
        and new.shape[1:] == kept[name].shape[1:]
        and (name != "timestamps" or new.dtype is torch.int64)
        for name, new in columns.items()
    )


def append_one(model: Retrieval, states: Sequence[HistoryState], columns: Columns) -> Tensor:
    """Appends one event to each of the states, which have room for it.

    Returns:
        [users, width]: their queries, as of a model without features of requests.
    """
    device = model.encoder.position.device
    graphs = _graphs.setdefault(model, _Graphs())
    with graphs.lock, use_device(device):
        if not graphs.watch.holds():
            graphs.watch, graphs.steps = _Watch(model), {}
        users = round_up_to_power_of_two(len(states))
        shapes = tuple((name, part.dtype, part.shape[1:]) for name, part in columns.items())
        # what a graph has read on the host
        read = model.normalize, torch.backends.cuda.matmul.fp32_precision
        stream = current_stream(device) if device.type == "cuda" else None
        key = users, shapes, read, stream
        step = graphs.steps.get(key)
        if step is None:
            step = graphs.steps[key] = _Step(model, users, columns)
        return step.run(model, states, columns)


class _Watch:
    """The tensors that graphs have the addresses of. Their contents may change."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        for module in [] if model is None else model.modules():
            homes: list[dict[str, Any]] = [module._modules, module._parameters, module._buffers]
            self._places += [(home, name, home[name]) for home in homes for name in home]
        self._tensors = [part for _, _, part in self._places if isinstance(part, Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def holds(self) -> bool:
        """Whether all are in their places; not without any."""
        for home, name, part in self._places:
            if home.get(name) is not part:
                return False
        found = [tensor.data_ptr() for tensor in self._tensors]
        return bool(found) and found == self._addresses


class _Graphs:
    """The graphs of a model."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a step has one set of inputs
        self.watch, self.steps = _Watch(), dict[Any, _Step]()


# Outside of the model: graphs are no part of what is saved, copied or sent.
_graphs: WeakKeyDictionary[Retrieval, _Graphs] = WeakKeyDictionary()


class _Step:
    """New events of up to so many users."""

    @torch.inference_mode(False)
    def __init__(self, model: Retrieval, users: int, like: Columns) -> None:
        encoder: Any = model.encoder
        device = encoder.position.device
        table = torch.zeros(users, len(NewEventColumn) + len(like), dtype=torch.int64)
        blank = [part.new_zeros(users, *part.shape[1:]) for part in like.values()]
        self._host = Packed.of([table, *blank], pin=device.type == "cuda")
        self._device = self._host.to(device)
        self._table_host, *self._columns_host = self._host.tensors()
        self._table, *inputs = self._device.tensors()
        self._columns = dict(zip(like, inputs, strict=True))
        edges = find_bucket_edges(encoder.num_time_buckets) if encoder.has_time_bias else None
        self._edges = None if edges is None else edges.to(device)
        self._copied = record_event_on(device)
        self._queries: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, model: Retrieval, states: Sequence[HistoryState], columns: Columns) -> Tensor:
        self._fill(states, columns)
        if self._graph is not None:
            self._graph.replay()
        elif self._queries is None or not self._queries.is_cuda:
            self._queries = self._compute(model)
        else:
            self._capture(model).replay()
        for state in states:
            state.length += 1
        assert self._queries is not None
        return self._queries[: len(states)].clone()  # the next step overwrites them

    def _fill(self, states: Sequence[HistoryState], columns: Columns) -> None:
        entries = []
        for state in states:
            state.reserve(1)
            slots, length = state.keys.shape[2], state.length
            kept = [state.columns[name] for name in columns]
            times = state.columns["timestamps"].data_ptr() if "timestamps" in columns else 0
            entries.append(
                [  # in the order of NewEventColumn
                    *(state.keys.data_ptr(), state.values.data_ptr(), slots, state.prefix),
                    *(length, state.skipped, times, state.output.data_ptr()),
                    *(rows.data_ptr() + length * rows.stride(0) * rows.itemsize for rows in kept),
                ]
            )
        if self._copied is not None:
            self._copied.synchronize()  # the last step may not have begun
        table = self._table_host.numpy()
        table[: len(states)], table[len(states) :] = entries, 0
        for place, values in zip(self._columns_host, columns.values(), strict=True):
            place[: len(states)] = values
        self._device.buffer.copy_(self._host.buffer, non_blocking=True)
        if self._copied is not None:
            self._copied.record(current_stream(self._table.device))

    def _compute(self, model: Retrieval) -> Tensor:
        """Of all that changes, reads the table and the columns on the device alone."""
        encoder: Any = model.encoder
        table, users = self._table, len(self._table)
        x = embed_events(model, self._columns, [1] * users)
        x = x.to(encoder.position.dtype) * encoder.input_scale
        x = x + encoder.position[table[:, NewEventColumn.LENGTH]]
        # before the attention, which reads the new event's time
        triton_decode.scatter([*self._columns.values()], table, len(NewEventColumn))
        for number, layer in enumerate(encoder.layers):
            x = self._run_layer(layer, number, x, encoder.visible)
        triton_decode.scatter([x], table, NewEventColumn.OUTPUT)
        return model.make_queries(x, None)

    def _run_layer(
        self, layer: HSTULayer, number: int, x: Tensor, visible: Visible | None
    ) -> Tensor:
        norm, after, projection = layer.input_norm, layer.attention_norm, layer.projection
        normed = torch.layer_norm(x, x.shape[1:], norm.weight, norm.bias, EPS)
        gated = triton_decode.attend(
            F.linear(normed, projection.weight, projection.bias),
            self._table,
            number,
            (layer.d_qk, layer.d_v),
            (after.weight, after.bias, EPS),
            layer.position_bias,
            layer.time_bias,
            self._edges,
            layer.max_length,
            visible,
        )
        return F.linear(gated, layer.output.weight, layer.output.bias).add_(x)

    def _capture(self, model: Retrieval) -> torch.cuda.CUDAGraph:
        graph, current = torch.cuda.CUDAGraph(), current_stream(self._table.device)
        stream = torch.cuda.Stream(self._table.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        # Not by torch.cuda.graph, which waits for the device and empties the memory's cache.
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._queries = self._compute(model)
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        self._graph = graph
        return graph
