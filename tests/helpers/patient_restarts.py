"""`freescale ...`, which starts ranks again only once they can be forked."""

from __future__ import annotations

import time

from freescale.cli.main import main
from freescale.launch.rank_server import RankServer
from helpers.rank_servers import hurry_imports


def explain_absence(server: RankServer, explain=RankServer.explain_absence) -> None:
    while not server.is_up() and server.pid is not None:
        time.sleep(0.02)
    explain(server)


if __name__ == "__main__":
    hurry_imports()
    RankServer.explain_absence = explain_absence
    main()
