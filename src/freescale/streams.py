"""The current stream of a GPU, and events on it.

torch's own functions look up the device and the environment on the way. They are called some
hundred times in a step, by threads that take the interpreter from the one that launches kernels.
"""

from __future__ import annotations

from typing import Any

import torch

# torch never gives a stream's number to another
_known: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    calls: Any = torch._C  # they are not in torch's stubs
    index = (
        device.index if device is not None and device.index is not None else calls._cuda_getDevice()
    )
    found = calls._cuda_getCurrentStream(index)  # number, index, type of the device
    stream = _known.get(found)
    if stream is None:
        number, index, kind = found
        stream = _known[found] = torch.cuda.Stream(
            stream_id=number, device_index=index, device_type=kind
        )
    return stream


def recorded(**options: bool) -> torch.cuda.Event:
    """An event at this point of the current stream. `options`: of torch.cuda.Event."""
    event = torch.cuda.Event(**options)
    event.record(current_stream())
    return event
