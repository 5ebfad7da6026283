"""The rungs of the ladder: what each of FreeScale's arms takes, as options of `freescale train`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from freescale.config import TrainConfig  # noqa: E402
from freescale.transport.choice import choose_transport  # noqa: E402

SERIAL, PERMUTED, FULL = "serial", "serial, samples permuted", "staged + balancing + hostwire"
PARTS = f"{FULL}, dense by parts"
DEFAULTS = "defaults"


@dataclass(frozen=True)
class Rung:
    """Fields are those of `TrainConfig`, with their defaults: DEFAULTS is `Rung()`."""

    schedule: str = TrainConfig.schedule
    balance: str = TrainConfig.balance
    balance_adapt: bool = TrainConfig.balance_adapt
    transport: str = TrainConfig.transport
    dense_sums: str = TrainConfig.dense_sums


# What does not differ between rungs, and is not `freescale train`'s.
_SHARED = "model, sharded table, optimizers and precision are the ladder's own on every rung"
_ADAPTED = {"balance": "greedy", "balance_adapt": True}
# Each rung adds one technique; the choices that `freescale train` makes by default are measured
# beside them.
OURS = {
    SERIAL: Rung("serial", "none", False, "collective", "collective"),
    "serial + balancing": Rung(
        "serial", **_ADAPTED, transport="collective", dense_sums="collective"
    ),
    "staged": Rung("staged", "none", False, "collective", "collective"),
    "staged + balancing": Rung(
        "staged", **_ADAPTED, transport="collective", dense_sums="collective"
    ),
    FULL: Rung("staged", **_ADAPTED, transport="hostwire-tcp", dense_sums="collective"),
    PARTS: Rung("staged", **_ADAPTED, transport="hostwire-tcp", dense_sums="partitioned"),
    DEFAULTS: Rung(),
}


def words(options: Mapping[str, Any]) -> str:
    """As a user would type them."""
    adapt = " --balance-adapt" if options["balance_adapt"] else ""
    balance = f"--balance {options['balance']}{adapt}"
    return (
        f"--schedule {options['schedule']} {balance} --transport {options['transport']} "
        f"--dense-sums {options['dense_sums']}"
    )


def about(result: Mapping[str, Any], tick: str = "") -> str:
    """What the names of a ladder's rungs stand for, and what `freescale train` takes on such ranks.
    `tick`: around options."""
    rows = {row["arm"]: row for row in result["rows"]}
    full = rows[FULL].get("options", asdict(OURS[FULL]))  # results of before have no options
    adapt = " --balance-adapt" if full["balance_adapt"] else ""
    said = f'"+ balancing" is {tick}--balance {full["balance"]}{adapt}{tick}'
    said += f', "+ hostwire" {tick}--transport {full["transport"]}{tick}'
    said += f', "dense by parts" {tick}--dense-sums partitioned{tick}' if PARTS in rows else ""
    device = "cuda" if result["machine"]["gpu"] else "cpu"
    if DEFAULTS in rows:
        taken = words(rows[DEFAULTS]["options"])
        return (
            f'{said}. "{DEFAULTS}" takes what freescale train takes by default on these ranks, '
            f"{tick}{taken}{tick}; {_SHARED}."
        )
    carrier, _ = choose_transport(Rung().transport, device, 1, ucx=False, rdma=False, engine=True)
    taken = words(asdict(replace(Rung(), transport=carrier)))
    return (
        f"{said}. The defaults of freescale train on these ranks, {tick}{taken}{tick}, were "
        f"not measured in this run; {_SHARED}."
    )
