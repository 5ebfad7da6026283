"""`freescale ...`, which starts ranks again only once they can be forked."""

from __future__ import annotations

import time

from freescale.cli.main import main
from freescale.train.rank_server import RankServer


def explain_absence(server: RankServer, explain=RankServer.explain_absence) -> None:
    end = time.monotonic() + 120
    while not server.is_up() and time.monotonic() < end:
        time.sleep(0.02)
    explain(server)


if __name__ == "__main__":
    RankServer.explain_absence = explain_absence
    main()
