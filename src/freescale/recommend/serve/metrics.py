"""The figures of /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TIMES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "freescale_requests", "Requests", ("path", "status"), registry=registry
        )
        self.seconds = Histogram(
            "freescale_request_seconds",
            "Time from the request's head to its answer; 503 are left out",
            ("path",),
            buckets=_TIMES,
            registry=registry,
        )
        self.batches = Histogram(
            "freescale_batch_size", "Queries of a batch", buckets=_SIZES, registry=registry
        )
        self.rejected = Counter("freescale_rejected", "Requests without room", registry=registry)
        self._gauges = {
            name: Gauge(f"freescale_{name}", text, registry=registry)
            for name, text in (
                ("queue_length", "Queries that wait or are being answered"),
                ("users", "Users whose events are kept"),
                ("user_bytes", "Memory of these events"),
                ("users_dropped", "Users who were dropped for others"),
            )
        }

    def render(self, **gauges: float) -> bytes:
        for name, value in gauges.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)
