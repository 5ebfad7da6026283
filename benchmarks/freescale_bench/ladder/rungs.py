"""The rungs of the ladder: each FreeScale arm as options of `freescale train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from freescale.config import TrainConfig
from freescale.transport.choice import choose_transport
from freescale_bench.common.results import Row

SERIAL, PERMUTED, FULL = "serial", "serial, samples permuted", "staged + balancing + hostwire"
SPARSE_DIST = "TorchRec TrainPipelineSparseDist"
PARTITIONED = f"{FULL}, dense partitioned"
DEFAULTS = "defaults"
# of the train ladder: the trainer itself, with its own model and data
PRODUCT = "freescale train"
UNBALANCED = f"{PRODUCT} without balancing"


@dataclass(frozen=True)
class Rung:
    """Fields are those of `TrainConfig`, with their defaults: DEFAULTS is `Rung()`."""

    schedule: str = TrainConfig.schedule
    balance: str = TrainConfig.balance
    balance_adapt: bool = TrainConfig.balance_adapt
    transport: str = TrainConfig.transport
    dense_sums: str = TrainConfig.dense_sums


# Settings that all rungs share, different from `freescale train`.
_SHARED = "model, sharded table, optimizers and precision are the ladder's own on every rung"
# Each rung adds one technique. The last is the defaults of `freescale train`.
OURS = {
    SERIAL: Rung("serial", "none", False, "collective", "collective"),
    "serial + balancing": Rung("serial", "greedy", True, "collective", "collective"),
    "staged": Rung("staged", "none", False, "collective", "collective"),
    "staged + balancing": Rung("staged", "greedy", True, "collective", "collective"),
    FULL: Rung("staged", "greedy", True, "hostwire-tcp", "collective"),
    PARTITIONED: Rung("staged", "greedy", True, "hostwire-tcp", "partitioned"),
    DEFAULTS: Rung(),
}


def spell_options(options: Mapping[str, Any]) -> str:
    """Formats options as typed on the command line."""
    adapt = " --balance-adapt" if options["balance_adapt"] else ""
    balance = f"--balance {options['balance']}{adapt}"
    return (
        f"--schedule {options['schedule']} {balance} --transport {options['transport']} "
        f"--dense-sums {options['dense_sums']}"
    )


def _explain_product(rows: Mapping[str, Any], tick: str) -> str:
    """Explains the rungs of the train ladder."""
    taken, serial = (rows[name]["options"] for name in (PRODUCT, SERIAL))
    return (
        f'"{PRODUCT}" is the command with its defaults, which were {tick}{spell_options(taken)} '
        f"--precision {taken['precision']}{tick} on these ranks; "
        f'"{SERIAL}" the same with {tick}{spell_options(serial)}{tick}, and "without balancing" '
        f"with {tick}--balance none{tick}. TorchRec trains the same module on the same file."
        + describe_link(rows, tick, SPARSE_DIST, PRODUCT)
    )


def explain_rungs(result: Mapping[str, Any], tick: str = "") -> str:
    """Explains the names of a ladder's rungs, and the defaults of `freescale train` on these ranks.
    `tick`: quotes options."""
    rows = {row["arm"]: row for row in result["rows"]}
    if PRODUCT in rows:
        return _explain_product(rows, tick)
    full = rows[FULL].get("options", asdict(OURS[FULL]))  # earlier results have no options
    adapt = " --balance-adapt" if full["balance_adapt"] else ""
    text = f'"+ balancing" is {tick}--balance {full["balance"]}{adapt}{tick}'
    text += f', "+ hostwire" {tick}--transport {full["transport"]}{tick}'
    text += (
        f', "dense partitioned" {tick}--dense-sums partitioned{tick}' if PARTITIONED in rows else ""
    )
    device = "cuda" if result["machine"]["gpu"] else "cpu"
    if DEFAULTS in rows:
        taken = spell_options(rows[DEFAULTS]["options"])
        return (
            f'{text}. "{DEFAULTS}" takes what freescale train takes by default on these ranks, '
            f"{tick}{taken}{tick}; {_SHARED}."
        )
    carrier, _ = choose_transport(Rung().transport, device, 1, ucx=False, rdma=False, engine=True)
    taken = spell_options(asdict(replace(Rung(), transport=carrier)))
    return (
        f"{text}. The defaults of freescale train on these ranks, {tick}{taken}{tick}, were "
        f"not measured in this run; {_SHARED}."
    )


def add_link_time(rows: list[Row], rate: str) -> None:
    """Sets `link_ms` of each row: the bytes that a rank sends per step over `rate` (such as
    200mbit). Links are full duplex, and ranks send about equally much."""
    bits_per_ms = 1e3 * int(rate.removesuffix("mbit"))
    for row in rows:
        sent = sum(row["bytes_per_step"].values()) / row["ranks"]
        row["link_ms"] = round(8 * sent / bits_per_ms, 2)


def describe_link(rows: Any, tick: str, peer: str, ours: str) -> str:
    """Describes the link time of two rows in a sentence; empty if it is unknown."""
    if "link_ms" not in rows.get(peer, {}) or "link_ms" not in rows[ours]:
        return ""
    parts = (
        f"{rows[arm]['link_ms']:.0f} ms of the {rows[arm]['step_ms']['median']:.0f} of a step"
        for arm in (peer, ours)
    )
    theirs, own = parts
    return (
        f" At the rate of the link the bytes of a rank take {theirs} with TorchRec's SparseDist, "
        f"and {own} with {tick}{ours}{tick}."
    )
