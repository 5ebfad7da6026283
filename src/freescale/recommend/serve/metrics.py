"""The figures of /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TIMES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_GAUGES = {
    "queue_length": "Requests that wait or are being answered",
    "users": "Users whose events are kept",
    "user_bytes": "Memory of these events",
    "users_dropped": "Users who were dropped for others",
}


class Metrics:
    def __init__(self) -> None:
        self._to = to = CollectorRegistry()
        time = "Time from the head of a request to its answer, without those of status 503"
        self.requests = Counter("freescale_requests", "Requests", ("path", "status"), registry=to)
        self.seconds = Histogram(
            "freescale_request_seconds", time, ("path",), buckets=_TIMES, registry=to
        )
        self.batches = Histogram(
            "freescale_batch_size", "Requests of a batch", buckets=_SIZES, registry=to
        )
        self.rejected = Counter("freescale_rejected", "Requests without room", registry=to)
        self._gauges = [Gauge(f"freescale_{name}", _GAUGES[name], registry=to) for name in _GAUGES]

    def render(self, *gauges: float) -> bytes:
        """`gauges` in the order of `_GAUGES`."""
        for gauge, value in zip(self._gauges, gauges, strict=True):
            gauge.set(value)
        return generate_latest(self._to)
