"""Predicts the time of collectives on a cluster: pure functions of the bytes that each rank sends
and receives.

A rank has two links: to ranks of its node (`near`), and to other nodes by a network card (`far`).
Both run at once; an exchange ends with the slower one. Over hostwire everything crosses PCIe and
the host's memory: near traffic is bound by PCIe instead of the GPUs' own links, far traffic by the
slower of PCIe and the card.

A network is a TOML file with the source of every number (networks/*.toml are the presets).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def list_names(folder: Path, suffix: str = ".toml") -> list[str]:
    return sorted(path.stem for path in folder.glob(f"*{suffix}"))


def find_file(folder: Path, name: str | Path, suffix: str, what: str) -> Path:
    """A shipped file by its name, or one of the user's own. ValueError if there is none."""
    shipped = list_names(folder, suffix)
    path = folder / f"{name}{suffix}" if str(name) in shipped else Path(name)
    if not path.is_file():
        raise ValueError(f"{name}: no such {what}; there is {', '.join(shipped)}, or a file")
    return path


def check_number(what: str, value: Any, above: bool = False) -> None:
    """Raises ValueError unless it is a finite number from 0 on, or `above` 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (above and value == 0):
        raise ValueError(f"{what} is {value!r}; it must be {'above 0' if above else '0 or more'}")


def read_toml(
    path: Path, known: Collection[str], needed: Collection[str], what: str
) -> dict[str, Any]:
    """Reads a TOML file without its `sources`. ValueError if it is not readable, or its keys are
    not those of `what`."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not readable as TOML ({error})") from error
    raw.pop("sources", None)  # the origin of the numbers, for people
    wrong = [f"unknown {name!r}" for name in sorted(set(raw) - set(known))]
    wrong += [f"{name!r} is missing" for name in sorted(set(needed) - set(raw))]
    if wrong:
        raise ValueError(f"{path}: {', '.join(wrong)}; {what} {', '.join(sorted(known))}")
    return raw


PRESETS = Path(__file__).parent / "networks"
TRANSPORTS = ("collective", "hostwire")
_CHUNK = 1 << 20  # bytes that hostwire copies at a time (transport/hostwire/csrc/channel.h)


@dataclass(frozen=True)
class Link:
    """One direction of a link."""

    gb_per_s: float
    latency_us: float

    def time_transfer(self, size: NDArray[Any] | float) -> Any:
        return np.asarray(size) / (self.gb_per_s * 1e9)

    @property
    def latency(self) -> float:
        return self.latency_us * 1e-6


@dataclass(frozen=True)
class Exchange:
    """Bytes of an AllToAll, each [ranks], without those that stay on a rank."""

    sent_near: NDArray[Any]
    sent_far: NDArray[Any]
    received_near: NDArray[Any]
    received_far: NDArray[Any]

    @property
    def sent(self) -> NDArray[Any]:
        return np.asarray(self.sent_near + self.sent_far)

    @property
    def received(self) -> NDArray[Any]:
        return np.asarray(self.received_near + self.received_far)


@dataclass(frozen=True)
class Network:
    """A cluster's links, as a TOML file describes them."""

    name: str
    gpus_per_node: int
    cards_per_node: int
    near: Link  # between GPUs of a node, of one GPU
    far: Link  # one network card
    pcie: Link  # between a GPU and the host's memory
    per_peer_us: float = 0.0  # of an AllToAll, for every other rank
    # share of a card's bandwidth that is lost when all other nodes send to it at once
    incast: float = 0.0
    # traffic in the card's queue: later messages wait for it whatever their class
    queue_ms: float = 0.0
    about: str = ""
    gpu: str = "GPU"  # name of one of its ranks
    calibration: str = "h200"  # default compute curve of its ranks
    device: str = "cuda"  # of its ranks
    memory_gb: float = 0.0  # of a GPU; 0: not known

    def __post_init__(self) -> None:
        where = f"network {self.name!r}: "
        for name in ("gpus_per_node", "cards_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                rule = "it must be a whole number, 1 or more"
                raise ValueError(f"{where}{name} is {value!r}; {rule}")
        for way in ("near", "far", "pcie"):
            link: Link = getattr(self, way)
            check_number(f"{where}{way}.gb_per_s", link.gb_per_s, above=True)
            check_number(f"{where}{way}.latency_us", link.latency_us)
        if not 0 <= self.incast < 1:
            rule = "it is a share of bandwidth, from 0 to below 1"
            raise ValueError(f"{where}incast is {self.incast}; {rule}")
        for name in ("per_peer_us", "queue_ms", "memory_gb"):
            check_number(f"{where}{name}", getattr(self, name))

    # ---- shape

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError unless the ranks fill whole nodes, or a part of one."""
        if ranks < 1:
            raise ValueError(f"{ranks} GPUs: there must be at least one")
        if ranks > self.gpus_per_node and ranks % self.gpus_per_node:
            raise ValueError(
                f"{ranks} GPUs do not fill nodes of {self.gpus_per_node} ({self.name}); give a "
                "multiple, or fewer than one node"
            )

    def node_size(self, ranks: int) -> int:
        return min(ranks, self.gpus_per_node)

    def count_nodes(self, ranks: int) -> int:
        return -(-ranks // self.gpus_per_node)

    def assign_nodes(self, ranks: int) -> NDArray[Any]:
        """[ranks]: the node of each, for the partitioners."""
        return np.arange(ranks) // self.gpus_per_node

    def split_exchange(self, sent: NDArray[Any], received: NDArray[Any]) -> Exchange:
        """sent and received [ranks]: bytes of each rank, its own part included, spread evenly over
        all ranks (a table's layout scatters its rows)."""
        ranks, node = len(sent), self.node_size(len(sent))
        near, far = (node - 1) / ranks, (ranks - node) / ranks
        return Exchange(sent * near, sent * far, received * near, received * far)

    # ---- collectives: seconds after the last rank has arrived

    def time_all_to_all(
        self, moved: Exchange, transport: str = "collective", peers: int | None = None
    ) -> NDArray[Any]:
        """[ranks] seconds. `peers`: with how many ranks each exchanges anything; None: all."""
        ranks = len(moved.sent_near)
        if ranks == 1:
            return np.zeros(1)
        near, far = self._find_links(transport)
        nodes = self.count_nodes(ranks)
        seconds = near.time_transfer(np.maximum(moved.sent_near, moved.received_near))
        latency = near.latency if self.node_size(ranks) > 1 else 0.0
        if nodes > 1:
            crowded = 1 - self.incast * (1 - 1 / (nodes - 1))  # one sender alone loses nothing
            outside = far.time_transfer(np.maximum(moved.sent_far, moved.received_far / crowded))
            seconds = np.maximum(seconds, outside)
            latency = max(latency, far.latency)
        filling = self._time_filling(np.maximum(moved.sent, moved.received), transport)
        peers = ranks - 1 if peers is None else peers
        return np.asarray(seconds + latency + filling + self.per_peer_us * 1e-6 * peers)

    def time_all_gather(self, size: float, ranks: int, transport: str = "collective") -> float:
        """Seconds; `size` bytes from each rank. A ring in which the cards of a node share traffic
        from outside."""
        near, far = self._find_links(transport)
        node, nodes = self.node_size(ranks), self.count_nodes(ranks)
        if ranks == 1:
            return 0.0
        seconds = float(near.time_transfer(size * (ranks - 1))) if node > 1 else 0.0
        if nodes > 1:
            seconds = max(seconds, float(far.time_transfer(size * (ranks - node) / node)))
        inside, outside = (node - 1) * near.latency, (nodes - 1) * far.latency
        return seconds + inside + outside + float(self._time_filling(size, transport))

    def time_all_reduce(self, size: float, ranks: int) -> float:
        """Seconds; `size` bytes on each rank. Reduced and gathered inside the node, and between
        nodes by each GPU for its part of the buffer: a ring for the bytes, a tree for the latency.
        Adds numbers, so it never goes over hostwire."""
        near, far = self._find_links("collective")
        node, nodes = self.node_size(ranks), self.count_nodes(ranks)
        if ranks == 1:
            return 0.0
        seconds = float(near.time_transfer(2 * size * (node - 1) / node))
        if nodes > 1:
            seconds = max(seconds, float(far.time_transfer(2 * size / node * (nodes - 1) / nodes)))
        return (
            seconds + 2 * (node - 1) * near.latency + 2 * math.ceil(math.log2(nodes)) * far.latency
        )

    def _time_filling(self, size: NDArray[Any] | float, transport: str) -> Any:
        """Seconds to fill hostwire's pipeline: the first chunk to the host, the last one back."""
        if transport == "hostwire":
            return 2 * self.pcie.time_transfer(np.minimum(size, _CHUNK))
        return np.zeros_like(size, dtype=float)

    def _find_links(self, transport: str) -> tuple[Link, Link]:
        """(near, far) of a transport, for one GPU. All GPUs of a node send at once: each has its
        share of the cards."""
        share = self.far.gb_per_s * self.cards_per_node / self.gpus_per_node
        far = Link(min(share, self.far.gb_per_s), self.far.latency_us)
        if transport == "collective":
            return self.near, far
        if transport != "hostwire":
            raise ValueError(f"transport {transport!r} is not one of {', '.join(TRANSPORTS)}")
        pcie, latency_us = self.pcie, 2 * self.pcie.latency_us
        through = Link(min(far.gb_per_s, pcie.gb_per_s), far.latency_us + latency_us)
        return Link(pcie.gb_per_s, latency_us), through


def list_presets() -> list[str]:
    return list_names(PRESETS)


def load_preset(name: str) -> Network:
    """Loads a preset by its name. Raises ValueError if there is none."""
    if name not in list_presets():
        raise ValueError(
            f"unknown preset {name!r}; there is {', '.join(list_presets())}, or a TOML "
            "file of your own (--network)"
        )
    return load_network(PRESETS / f"{name}.toml")


def load_network(path: str | Path) -> Network:
    """Loads a TOML file. Raises ValueError if it is not a network."""
    path, ways = Path(path), ("near", "far", "pcie")
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; give a TOML file like those of freescale/simulate/networks"
        )
    known = {entry.name for entry in fields(Network)}
    raw = read_toml(path, known, {"gpus_per_node", "cards_per_node", *ways}, "a network has")
    try:
        links = {
            way: Link(**{name: float(value) for name, value in raw.pop(way).items()})
            for way in ways
        }
        return Network(**{"name": path.stem, **raw, **links})
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{path}: near, far and pcie are tables with gb_per_s and latency_us ({error})"
        ) from error
