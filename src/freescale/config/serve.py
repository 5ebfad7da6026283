"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass

from freescale.config.options import Checked, option

_NETWORK, _LOAD, _MODEL = "Network", "Load", "Model"


@dataclass(frozen=True)
class ServeConfig(Checked):
    """Settings of `freescale serve`."""

    heading = "Limits of a request"

    host: str = option("127.0.0.1", "address; 0.0.0.0 for all of this machine", _NETWORK, True)
    port: int = option(8000, "0: a free one", _NETWORK, True, minimum=0, maximum=65535)
    token: str | None = option(
        None, "requests need `Authorization: Bearer TOKEN`; as the environment variable "
        "FREESCALE_TOKEN other users of the machine do not see it", _NETWORK, True,
    )  # fmt: skip
    access_log: bool = option(True, "a line of JSON on stderr for each request", _NETWORK)
    batch: int = option(16, "most requests that the model answers at a time", _LOAD, minimum=1)
    wait: float = option(
        2.0, "milliseconds that a request waits for others to share its batch", _LOAD, minimum=0
    )
    queue: int = option(
        24, "requests that wait or are being answered; more get status 503 at once", _LOAD, True,
        minimum=1,
    )  # fmt: skip
    memory: str = option(
        "256MB", "for the events of users; those who were seen longest ago are dropped", _LOAD, True
    )
    keep_events: int = option(
        1000, "events kept of a user beyond the model's max-length, for exclude_seen", _LOAD,
        minimum=0,
    )  # fmt: skip
    max_body: str = option("1MB", "size of a body")
    max_k: int = option(1000, "items of an answer", minimum=1)
    max_history: int = option(10_000, "events of a history", minimum=1)
    max_candidates: int = option(10_000, "items to choose from, or to score", minimum=1)
    data: str | None = option(None, "where the run's data is, if it has moved", _MODEL)
    checkpoint: str | None = option(
        None, "last, best or a step (default: the best of a run with --keep best, else the last)",
        _MODEL,
    )  # fmt: skip
    follow: bool = option(
        False, "a run that publishes deltas: answer with its newest state, while it trains", _MODEL,
        True,
    )  # fmt: skip
    approximate: bool = option(
        False, "search an index instead of all items: that of an export, or with --follow one that "
        "is built for each version", _MODEL,
    )  # fmt: skip
    device: str = option("auto", "of the model", _MODEL, choices=("auto", "cpu", "cuda"))
    threads: int | None = option(
        None, "cores for the model (default: half of them; the others read requests)", _MODEL,
        minimum=1,
    )  # fmt: skip

    @property
    def max_requests(self) -> int:
        """Of one body."""
        return min(self.queue, 64)
