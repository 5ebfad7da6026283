"""From the records of all ranks to the figures of a step and of a run. Pure functions over plain
data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from freescale.ledger.busy import own_waits
from freescale.ledger.ledger import KINDS
from freescale.ledger.trace import rename_lane

# Spans that are this rank's own work: what imbalance compares.
COMPUTE = ("forward", "backward")
# Figures not of every step.
_SOMETIMES = (
    "collision_percent",
    "sparsity",
    "predicted_imbalance_before",
    "predicted_imbalance",
    "moved_tokens_percent",
    "cost_error_percent",
    "dense_sent_percent",
)
# What a rank has of a batch: the counter before balancing and the one after it.
_SHARES = {
    "samples": ("samples", "after_samples"),
    "tokens": ("tokens", "after_tokens"),
    "longest": ("max_length", "after_longest"),
    "cost": ("before_cost", "after_cost"),
}


def shifted(record: Mapping, offset: int) -> dict:
    """A rank's record with its times moved to the clock of rank 0."""
    return {
        **record,
        "begin": record["begin"] + offset,
        "end": record["end"] + offset,
        "spans": [[name, a + offset, b + offset] for name, a, b in record["spans"]],
        "collectives": [
            [k, s, r, *(t + offset for t in times)] for k, s, r, *times in record["collectives"]
        ],
    }


def merge_step(records: Sequence[Mapping]) -> dict:
    """Figures of one step from the records of all ranks (rank order, one clock). Times in
    milliseconds."""
    ranks = len(records)
    sequence = [[c[0] for c in record["collectives"]] for record in records]
    if any(kinds != sequence[0] for kinds in sequence):
        raise ValueError(
            f"ranks recorded different collectives in step {records[0]['step']}: {sequence}"
        )
    straggler = [0.0] * ranks
    exposed = {kind: [0.0] * ranks for kind in KINDS}
    moved = dict.fromkeys(KINDS, 0)
    waits = [own_waits(record["collectives"]) for record in records]
    for number, entries in enumerate(
        zip(*(record["collectives"] for record in records), strict=True)
    ):
        last = max(entry[3] for entry in entries)
        for rank, (kind, sent, *_) in enumerate(entries):
            for begin, end in waits[rank][number]:
                straggler[rank] += max(0, min(end, last) - begin) / 1e6
                exposed[kind][rank] += max(0, end - max(begin, last)) / 1e6
            moved[kind] += sent
    paths: dict[str, dict[str, int]] = {}
    for record in records:
        for kind, by_path in record.get("paths", {}).items():
            of_kind = paths.setdefault(kind, {})
            for path, sent in by_path.items():
                of_kind[path] = of_kind.get(path, 0) + sent
    durations = [(record["end"] - record["begin"]) / 1e6 for record in records]
    mean = sum(durations) / ranks
    compute = [
        sum(b - a for name, a, b in record["spans"] if name in COMPUTE) / 1e6 for record in records
    ]
    spans: dict[str, float] = {}
    for record in records:
        for name, a, b in record["spans"]:
            spans[name] = spans.get(name, 0.0) + (b - a) / 1e6 / ranks
    counters: dict[str, float] = {}
    for record in records:
        for name, value in record["counters"].items():
            counters[name] = (
                max(counters.get(name, value), value)
                if name.startswith("max_")
                else counters.get(name, 0) + value
            )
    figures = {
        "step": records[0]["step"],
        "step_ms": mean,
        "straggler_percent": 100 * sum(straggler) / ranks / mean,
        "straggler_ms": straggler,
        "exposed_ms": {kind: sum(times) / ranks for kind, times in exposed.items()},
        "exposed_ms_per_rank": [sum(times) for times in zip(*exposed.values(), strict=True)],
        "lane_ms": [round(record.get("lanes", 0) / 1e6, 3) for record in records],
        "busy_ms": _busy(records),
        **_shares(records),
        "bytes": moved,
        "paths": paths,
        "compute_ms": compute,
        "imbalance": max(compute) * ranks / sum(compute) if sum(compute) else 1.0,
        "spans_ms": spans,
        "samples": counters.get("samples", 0),
        "tokens": counters.get("tokens", 0),
    }
    if counters.get("max_length"):
        figures["sparsity"] = 1 - counters["tokens"] / (
            counters["samples"] * counters["max_length"]
        )
    if "max_predicted_imbalance" in counters:
        figures["predicted_imbalance"] = counters["max_predicted_imbalance"]
        costs = figures["before"].get("cost", [])
        if sum(costs):
            figures["predicted_imbalance_before"] = max(costs) * ranks / sum(costs)
        figures["moved_tokens_percent"] = (
            100 * counters["max_moved_tokens"] / max(1, counters.get("tokens", 0))
        )
    if "max_cost_error" in counters:
        figures["cost_error_percent"] = 100 * counters["max_cost_error"]
    if counters.get("requests"):
        figures["collision_percent"] = 100 * counters["collisions"] / counters["requests"]
    if counters.get("dense_entries"):
        figures["dense_sent_percent"] = (
            100 * counters["dense_entries_sent"] / counters["dense_entries"]
        )
    return figures


def _busy(records: Sequence[Mapping]) -> dict[str, list[float]]:
    """What the main threads did when they did not wait: milliseconds of each rank by name, to the
    microsecond."""
    names = dict.fromkeys(name for record in records for name in record.get("busy", {}))
    return {
        name: [round(record.get("busy", {}).get(name, 0) / 1e6, 3) for record in records]
        for name in names
    }


def _shares(records: Sequence[Mapping]) -> dict[str, dict[str, list[float]]]:
    """What each rank had of the batch `before` balancing and `after` it; nothing after where
    nothing was balanced."""
    found: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    for name, counters in _SHARES.items():
        for when, counter in zip(found, counters, strict=True):
            if any(counter in record["counters"] for record in records):
                found[when][name] = [record["counters"].get(counter, 0) for record in records]
    return found


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Summary:
    """Figures of a run, step by step in constant memory but for one number a step (the median of
    the step time)."""

    def __init__(self, ranks: int, warmup: int = 2) -> None:
        self.ranks = ranks
        self.warmup = warmup  # first steps allocate and connect: they are counted, not averaged
        self._seen = 0
        self._busy_steps = self._path_steps = 0
        self._step_ms: list[float] = []
        self._sums: dict[str, float] = {}
        self._rank_sums: dict[str, list[float]] = {}
        self._counts: dict[str, int] = {}

    def add(self, figures: Mapping) -> None:
        self._seen += 1
        if self._seen <= self.warmup:
            return
        self._step_ms.append(figures["step_ms"])
        flat = {k: figures[k] for k in ("straggler_percent", "imbalance", "samples", "tokens")}
        flat |= {k: figures[k] for k in _SOMETIMES if k in figures}
        for group in ("exposed_ms", "bytes"):
            flat |= {f"{group}/{name}": value for name, value in figures[group].items()}
        # A resumed run reads lines of an earlier version.
        flat |= {f"spans_ms/{rename_lane(name)}": v for name, v in figures["spans_ms"].items()}
        for kind, by_path in figures.get("paths", {}).items():
            flat |= {f"paths/{kind}/{path}": sent for path, sent in by_path.items()}
        for name, value in flat.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        for name in ("compute_ms", "straggler_ms", "exposed_ms_per_rank", "lane_ms"):
            self._add_per_rank(name, figures.get(name))
        for name, values in figures.get("busy_ms", {}).items():
            self._add_per_rank(f"busy_ms/{name}", values)
        # Lines of an older version lack them.
        self._busy_steps += "busy_ms" in figures
        self._path_steps += "paths" in figures

    def _add_per_rank(self, name: str, values: Sequence[float] | None) -> None:
        """A resumed run may have had more ranks before, and lines of an older version lack some
        figures."""
        if values is None:
            return
        totals = self._rank_sums.setdefault(name, [0.0] * self.ranks)
        for rank, value in enumerate(values[: self.ranks]):
            totals[rank] += value
        self._counts[name] = self._counts.get(name, 0) + 1

    def _per_rank(self, name: str) -> list[float]:
        return [total / self._counts[name] for total in self._rank_sums.get(name, [])]

    def result(self) -> dict:
        """Means over the measured steps; step time as a median too."""
        measured = len(self._step_ms)
        if not measured:
            return {"ranks": self.ranks, "steps": self._seen, "measured_steps": 0}
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        seconds = sum(self._step_ms) / 1e3

        def group(prefix: str) -> dict[str, float]:
            return {n.split("/", 1)[1]: v for n, v in means.items() if n.startswith(f"{prefix}/")}

        exposed = group("exposed_ms")
        paths: dict[str, dict[str, float]] = {}
        for name, sent in self._sums.items():
            if name.startswith("paths/"):
                _, kind, path = name.split("/", 2)
                # Over all steps, like `bytes_per_step`: the last ones have no samples to move.
                paths.setdefault(kind, {})[path] = sent / self._path_steps
        return {
            "ranks": self.ranks,
            "steps": self._seen,
            "measured_steps": measured,
            "step_ms": {"mean": seconds * 1e3 / measured, "median": _median(self._step_ms)},
            "samples_per_second": self._sums["samples"] / seconds,
            "tokens_per_second": self._sums["tokens"] / seconds,
            "straggler_percent": means["straggler_percent"],
            "exposed_percent": 100 * sum(exposed.values()) * measured / (seconds * 1e3),
            "exposed_ms": exposed,
            "bytes_per_step": group("bytes"),
            "paths": paths,  # bytes a step, by kind of traffic and by what carried them
            **{name: means.get(name) for name in _SOMETIMES},
            "imbalance": means["imbalance"],
            "spans_ms": group("spans_ms"),
            "compute_ms_per_rank": self._per_rank("compute_ms"),
            "straggler_ms_per_rank": self._per_rank("straggler_ms"),
            "exposed_ms_per_rank": self._per_rank("exposed_ms_per_rank"),
            "lane_ms_per_rank": self._per_rank("lane_ms"),
            # Over all measured steps, also those without the span: with the waits it adds up to the
            # step.
            "busy_ms_per_rank": {
                name.split("/", 1)[1]: [total / self._busy_steps for total in totals]
                for name, totals in self._rank_sums.items()
                if name.startswith("busy_ms/")
            },
        }
