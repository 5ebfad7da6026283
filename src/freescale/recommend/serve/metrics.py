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
FOLLOWED = {
    "version": "Number of the delta that is served",
    "version_step": "Step of the run that it is of",
    "version_published_seconds": "When it was published, since 1970",
    "swaps": "Versions that have come since the server began",
    "apply_seconds": "Time to apply the deltas of the last version",
    "build_seconds": "Time from then until its vectors and its index were ready",
    "delta_alarm": "1: a delta is damaged or missing, and an older version is served",
}


class Metrics:
    """`follows`: with the figures of `FOLLOWED`."""

    def __init__(self, follows: bool = False) -> None:
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
        gauges = _GAUGES | (FOLLOWED if follows else {})
        self._gauges = [Gauge(f"freescale_{name}", gauges[name], registry=to) for name in gauges]

    def render(self, *gauges: float) -> bytes:
        """`gauges` in the order of `_GAUGES` and `FOLLOWED`."""
        for gauge, value in zip(self._gauges, gauges, strict=True):
            gauge.set(value)
        return generate_latest(self._to)
