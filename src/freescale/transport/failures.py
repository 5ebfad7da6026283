"""A failure on one rank ends the work of all ranks, with its words."""

from __future__ import annotations

from freescale.transport.api import Transport


class RemoteError(RuntimeError):
    """Another rank failed or left the loop; this one stops with it."""


def find_first_error(error: Exception | None, transport: Transport) -> Exception | None:
    """What this rank has to raise. A collective.

    Args:
        error: this rank's own failure; None if it has none.
        transport: over all ranks.

    Returns:
        This rank's own error; otherwise a `RemoteError` with the words of the first rank that
        failed; None if no rank failed.
    """
    message = f"{type(error).__name__}: {error}" if error is not None else ""
    messages = transport.gather_bytes(message.encode())
    if error is not None:
        return error
    for rank, text in enumerate(messages):
        if text:
            return RemoteError(f"rank {rank} stopped: {text.decode()}")
    return None


def raise_together(error: Exception | None, transport: Transport) -> None:
    """Raises on all ranks if one of them failed. A collective."""
    found = find_first_error(error, transport)
    if found is not None:
        raise found
