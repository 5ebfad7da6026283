"""How a command ends: what an error says, and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def guarded(action: Callable[[], int | None]) -> None:
    """Errors that a user can mend are one line; others keep their traceback. The exit status is
    never 0 after one."""
    rank = os.environ.get("RANK")
    prefix = "freescale: " if rank in (None, "0") else f"freescale: rank {rank}: "
    try:
        status = action()
    except KeyboardInterrupt:
        print(f"{prefix}interrupted", file=sys.stderr)
        status = 130
    except (ValueError, OSError, RuntimeError) as error:
        own = isinstance(error, (ValueError, OSError))
        if not own:
            from freescale.pipeline.agreement import RemoteError
            from freescale.transport.api import TransportError

            if not isinstance(error, (RemoteError, TransportError)):
                raise
        # The same words on every rank, so that the launcher can say them once.
        print(f"{'freescale: error: ' if own else prefix}{error}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if rank is not None:
        # A failed rank must not wait for peers in the destructors of its process groups.
        os._exit(status or 0)
    sys.exit(status or 0)
