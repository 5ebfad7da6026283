"""Time of one new event: appended to the state of its history, and with the whole history computed
anew. The arms take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.batch import Jagged, SequenceBatch
from freescale.models import HSTU, HistoryState, Retrieval, append_events, start_histories
from freescale_bench.common.ranks import get_gpu_name, require_gpu
from freescale_bench.common.results import Destination, Row, at_most, spread, write

ITEMS = 10_000
EACH = 10  # appends in a turn, next to one history computed anew
LONG = 4096  # events, of the target
MOST = 10.0  # percent: target


@dataclass(frozen=True)
class Shape:
    width: int = 512
    layers: int = 8
    heads: int = 8
    max_length: int = 8192
    # (events, users of a batch)
    histories: tuple[tuple[int, int], ...] = ((256, 1), (1024, 1), (1024, 8), (LONG, 1))

    def build(self, device: str) -> Retrieval:
        torch.manual_seed(0)
        encoder = HSTU(
            width=self.width, layers=self.layers, heads=self.heads, max_length=self.max_length
        )
        return Retrieval(encoder, num_items=ITEMS).to(device).eval()


TRIAL = Shape(width=16, layers=2, heads=2, max_length=128, histories=((16, 1), (16, 2), (32, 1)))


class Arms:
    """Histories of users that grow, on the host; and their states."""

    def __init__(self, model: Retrieval, events: int, users: int) -> None:
        self.model, self.device = model, model.item.weight.device
        self.generator = torch.Generator().manual_seed(events)
        self.histories = [self._draw(events, 0) for _ in range(users)]
        batch = SequenceBatch.concat(self.histories)
        self.states: list[HistoryState] = start_histories(model, batch)

    def _draw(self, events: int, after: int) -> SequenceBatch:
        """One user's events, with times above `after`."""
        lengths = torch.tensor([events])
        items, steps = (
            torch.randint(1, high, (events,), generator=self.generator) for high in (ITEMS, 10_000)
        )
        columns = {"history": items, "timestamps": after + steps.cumsum(0)}
        return SequenceBatch({name: Jagged(part, lengths) for name, part in columns.items()})

    def add(self, count: int = 1) -> SequenceBatch:
        """New events of every user, a batch on the host."""
        new = []
        for user, history in enumerate(self.histories):
            new.append(self._draw(count, int(history.values("timestamps")[-1])))
            parts = history.sequences, new[-1].sequences
            joined = {n: torch.cat([part[n].values for part in parts]) for n in parts[0]}
            lengths = torch.tensor([len(joined["history"])])
            self.histories[user] = SequenceBatch(
                {name: Jagged(values, lengths) for name, values in joined.items()}
            )
        return SequenceBatch.concat(new)

    def append(self, events: SequenceBatch) -> Tensor:
        return append_events(self.model, self.states, events).cpu()

    @torch.no_grad()
    def compute_anew(self, batch: SequenceBatch) -> Tensor:
        return self.model.encode_queries(batch.to(self.device)).cpu()

    def measure(self, turns: int) -> Row:
        for _ in range(3 * EACH if self.device.type == "cuda" else 1):  # warm up
            self.append(self.add())
            found = self.compute_anew(SequenceBatch.concat(self.histories))
        appended: list[float] = []
        anew: list[float] = []
        difference = 0.0
        for _ in range(turns):
            for _ in range(EACH):
                queries, seconds = _time(self.append, self.add())
                appended.append(seconds)
            found, seconds = _time(self.compute_anew, SequenceBatch.concat(self.histories))
            anew.append(seconds)
            difference = max(difference, float((found - queries).abs().max()))
        times = {"append_ms": spread(appended), "anew_ms": spread(anew)}
        median = {name: values["median"] for name, values in times.items()}
        return {
            **times,
            "append_percent": 100 * median["append_ms"] / median["anew_ms"],
            "gain": median["anew_ms"] / median["append_ms"],
            "largest_difference": difference,
            "bytes_of_state": self.states[0].nbytes,
        }

    def measure_rebuild(self, turns: int) -> Row:
        """A full history drops its oldest quarter: once in as many events."""
        (state,) = self.states
        quarter = state.limit // 4
        rebuilds: list[float] = []
        for _ in range(2 if self.device.type == "cpu" else turns):
            _, seconds = _time(self.append, self.add(state.limit + 1 - state.length))
            rebuilds.append(seconds)
        assert state.rebuilds == len(rebuilds) and state.length == state.limit - quarter
        self.append(self.add(quarter // 2))  # the mean length until the next one
        appended = [_time(self.append, self.add())[1] for _ in range(EACH * turns)]
        times = {"rebuild_ms": spread(rebuilds), "append_ms": spread(appended)}
        rebuild, each = (values["median"] for values in times.values())
        return {**times, "amortised_ms": each + (rebuild - each) / quarter}


def _time(compute: Callable[[SequenceBatch], Tensor], batch: SequenceBatch) -> tuple[Tensor, float]:
    begin = time.perf_counter()
    found = compute(batch)  # waits for the device: the result is on the host
    return found, 1e3 * (time.perf_counter() - begin)


def bench_append(device: str, turns: int, threads: int, trial: bool, to: Destination) -> None:
    require_gpu(device)
    torch.set_num_threads(threads)
    shape = TRIAL if trial else Shape()
    model = shape.build(device)
    rows: list[Row] = []
    for events, users in shape.histories:
        arms = Arms(model, events, users)
        rows.append({"arm": "append", "events": events, "users": users, **arms.measure(turns)})
        print(rows[-1], flush=True)
    last = rows[-1]
    amortised: dict[str, Any] = arms.measure_rebuild(turns)
    amortised["percent_of_anew"] = 100 * amortised["amortised_ms"] / last["anew_ms"]["median"]
    rows.append({"arm": "rebuild", "events": shape.max_length, "users": 1, **amortised})
    print(rows[-1], flush=True)
    if trial:
        return
    text = f"one event appended to {LONG:,} events, of the time of computing them anew"
    claims = [
        at_most(text, MOST, last["append_percent"], "%"),
        at_most("the same, with its share of a rebuild", MOST, amortised["percent_of_anew"], "%"),
    ]
    command = f"freescale bench recommend append --device {device} --turns {turns}"
    command += f" --threads {threads}" if device == "cpu" else ""
    testbed = get_gpu_name() if device == "cuda" else "cpu"
    sizes = {name: getattr(shape, name) for name in ("width", "layers", "heads", "max_length")}
    write("recommend-append", testbed, command, rows, claims, ["triton"], to=to, model=sizes)
