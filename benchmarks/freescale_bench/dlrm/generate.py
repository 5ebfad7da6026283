"""Events in Yambda's layout (data/ingest/yambda.py), with its published statistics and planted
preferences.

Users have hidden tastes, artists hidden styles, both vectors. A listen is played to the end with a
probability that grows with their product, so a model that learns tastes from histories can reach
the AUC of that probability itself, the oracle, which `truth.json` has. Memory is that of the
catalogue and a block of users. `freescale generate --like yambda` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.cli.runs import show_progress
from freescale.config import GenerateConfig
from freescale.data.batches.specs import check_least
from freescale.data.ingest.yambda import EVENTS, KINDS, LISTENED, MAPPINGS
from freescale.data.synthetic.draws import SHORTEST, LengthDistribution, find_ends
from freescale.data.workspace import explain_full_disk, workspace
from freescale.random import derive, hash_name, integers, normal, uniform

TRUTH = "truth.json"
MEDIAN, SIGMA, CAP = 2695.0, 1.1337, 27_738  # of the events of a user: the mean is 4,763
# of the catalogue, for each user
ITEMS, ARTISTS, ALBUMS = 9.39, 1.293, 3.368
LISTEN_PLUS, SKIP, LIKE = 0.613, 0.359, 0.019  # shares of the events
_DISLIKED = np.array([0.5, 0.35])  # of the other events: dislikes, unlikes; the rest are undislikes
_STEP, _LAST = 5, 26_000_000  # seconds
_ORGANIC = 0.52
_TASTES, _STRENGTH = 8, 2.0  # length of the hidden vectors; how much they decide
_OWNERS_POWER = 0.5  # Zipf exponent of the sizes of artists and albums
_WITHOUT = {"artist": 0.012, "album": 0.078}  # shares of items that a mapping lacks
_TWO_ARTISTS = 0.05
_BLOCK = 1 << 20  # events in memory, about
_BINS = 4096  # of the probabilities that the oracle ranks by


@dataclass(frozen=True)
class YambdaReport:
    """What was written; `truth.json`."""

    users: int
    items: int
    artists: int
    albums: int
    events: int
    kinds: dict[str, float]  # share of each kind of event, listen_plus and skip apart
    oracle_auc: float  # of listen_plus among listens
    hot_album: float
    seed: int


def command(arguments: Sequence[str]) -> int:
    """Options that are not given have the statistics of Yambda as their defaults."""
    parser = argparse.ArgumentParser("freescale generate --like yambda", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--users", type=int, default=GenerateConfig.users)
    parser.add_argument("--items", type=int, help="default: as many for each user as in Yambda")
    parser.add_argument("--median", type=float, default=MEDIAN, help="events of a user")
    parser.add_argument("--sigma", type=float, default=SIGMA, help="of their logarithm")
    parser.add_argument("--cap", type=int, default=CAP, help="most events of a user")
    parser.add_argument("--popularity", type=float, default=GenerateConfig.popularity)
    parser.add_argument("--hot-album", type=float, default=GenerateConfig.hot_album)
    parser.add_argument("--seed", type=int, default=GenerateConfig.seed)
    options = parser.parse_args(arguments)
    with show_progress() as progress:
        report = generate_yambda(progress=progress, **vars(options))
    print(
        f"wrote {options.folder}: {report.users:,} users, {report.events:,} events, "
        f"{report.items:,} items of {report.artists:,} artists, "
        f"{report.kinds['listen_plus']:.1%} listen_plus; the best AUC is {report.oracle_auc:.4f}"
    )
    words = ["--data", str(options.folder), "--task", "ranking", "--labels", "listen_plus"]
    split = "--split time --split-time 25913600"
    print(f"train on it: freescale train {shlex.join(words)} {split}")
    return 0


def generate_yambda(
    folder: str | Path,
    *,
    users: int,
    items: int | None = None,
    median: float = MEDIAN,
    sigma: float = SIGMA,
    cap: int = CAP,
    popularity: float = GenerateConfig.popularity,
    hot_album: float = GenerateConfig.hot_album,
    seed: int = GenerateConfig.seed,
    progress: Callable[[str, float], None] | None = None,
) -> YambdaReport:
    """Writes the three files of Yambda's layout and `truth.json`.

    Args:
        folder: Where to write.
        users: How many. The catalogue is as much smaller than Yambda's as they are fewer.
        items: Size of the catalogue, instead.
        median: Of the events of a user.
        sigma: Of their logarithm.
        cap: Most events of a user.
        popularity: Zipf exponent of the items.
        hot_album: Share of the events that are of one album, in addition to its own.
        seed: Of everything that is drawn.
        progress: Called with "generate" and the share done.

    Raises:
        ValueError: An option is out of range.
        OSError: The disk is full.
    """
    folder = Path(folder)
    check_least(1, users=users, items=items or 1)
    check_least(SHORTEST, cap=cap)
    if not 0 <= hot_album <= 1:
        raise ValueError(f"hot_album is {hot_album}; it is a share, from 0 to 1")
    lengths = LengthDistribution.from_options("lognormal", median, sigma, 0.0, cap)
    catalogue = _Catalogue(items or max(1, round(ITEMS * users)), popularity, seed)
    folder.mkdir(parents=True, exist_ok=True)
    full = explain_full_disk(folder, f"generating {folder}", "make room, or name another folder")
    with full, workspace(folder, "generate") as made:
        for owner, name in MAPPINGS.items():
            pq.write_table(catalogue.make_mapping(owner), made / name)
        step, counts = max(1, int(_BLOCK / lengths.mean)), np.zeros((2, _BINS), np.int64)
        kinds: NDArray[Any] = np.zeros(len(KINDS), np.int64)
        with pq.ParquetWriter(made / EVENTS, _SCHEMA) as writer:
            for first in range(1, users + 1, step):
                block = torch.arange(first, min(first + step, users + 1))
                table, chance, kind = _draw_events(catalogue, lengths, block, hot_album)
                writer.write_table(table)
                kinds += np.bincount(kind, minlength=len(KINDS))
                played = table.column("played_ratio_pct").to_numpy()[kind == 0] >= LISTENED
                bins = (chance[kind == 0] * _BINS).astype(np.int64).clip(max=_BINS - 1)
                for label in (0, 1):
                    counts[label] += np.bincount(bins[played == label], minlength=_BINS)
                if progress is not None:
                    progress("generate", min(first + step, users) / users)
        events = int(kinds.sum())
        shares = dict(zip(("skip", "listen_plus"), (counts.sum(1) / events).tolist(), strict=True))
        shares |= dict(zip(KINDS[1:], (kinds[1:] / events).tolist(), strict=True))
        sizes = (users, catalogue.items, catalogue.artists, catalogue.albums, events)
        report = YambdaReport(*sizes, shares, _compute_auc(*counts), hot_album, seed)
        (made / TRUTH).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
        for name in (*MAPPINGS.values(), TRUTH, EVENTS):
            os.replace(made / name, folder / name)
    return report


def compute_chances(
    report: YambdaReport, users: NDArray[np.int64], items: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[n]: the probability with which generated data has a listen of user [n] to item [n] played
    for half of its length: what a model can know at best of any of its events."""
    catalogue = _Catalogue(report.items, GenerateConfig.popularity, report.seed)
    tastes = catalogue.draw_vectors("taste", torch.from_numpy(users))
    return catalogue.find_chances(tastes, items)


_SCHEMA = pa.schema(
    {
        "uid": pa.uint32(),
        "timestamp": pa.uint32(),
        "item_id": pa.uint32(),
        "is_organic": pa.uint8(),
        "played_ratio_pct": pa.uint16(),
        "track_length_seconds": pa.uint32(),
        "event_type": pa.dictionary(pa.int32(), pa.string()),
    }
)


class _Catalogue:
    """Items with their artists and albums. Ids begin with 1."""

    def __init__(self, items: int, popularity: float, seed: int) -> None:
        self.items, self.seed = items, seed
        scale = items / ITEMS
        self.artists, self.albums = (max(2, round(scale * each)) for each in (ARTISTS, ALBUMS))
        self.ends = find_ends(items, popularity)
        self.item_of_rank = torch.argsort(self.draw("item ids", torch.arange(items))).numpy() + 1
        albums = uniform(self.draw("album", torch.arange(items))).numpy()
        self.album = 1 + np.searchsorted(find_ends(self.albums, _OWNERS_POWER), albums, "right")
        artists = uniform(self.draw("artist", torch.arange(self.albums))).numpy()
        of_album = np.searchsorted(find_ends(self.artists, _OWNERS_POWER), artists, "right")
        self.artist = 1 + of_album[self.album - 1]

    def draw(self, purpose: str, *counters: Tensor | int) -> Tensor:
        return derive(self.seed, hash_name(purpose), *counters)

    @cached_property
    def hot_items(self) -> NDArray[np.int64]:
        """The items of the largest album."""
        return 1 + np.flatnonzero(self.album == np.bincount(self.album).argmax())

    @cached_property
    def styles(self) -> NDArray[np.float32]:
        """[artists, tastes], of length 1."""
        found = self.draw_vectors("style", torch.arange(1, self.artists + 1))
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))

    def draw_vectors(self, purpose: str, ids: Tensor) -> NDArray[np.float32]:
        drawn: NDArray[np.float32] = normal(
            self.draw(purpose, ids[:, None], torch.arange(_TASTES))
        ).numpy()
        return drawn

    def find_chances(
        self, tastes: NDArray[np.float32], items: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """[n]: how probable it is that users with tastes [n, tastes] listen to items [n]."""
        affinity = (tastes * self.styles[self.artist[items - 1] - 1]).sum(1)
        return _sigmoid(_BIAS + _STRENGTH * affinity.astype(np.float64))

    def make_mapping(self, kind: str) -> pa.Table:
        """Sorted by owner, as published. Some items have two artists, of which the last row, the
        larger number, is the one whose style counts."""
        ids = torch.arange(1, self.items + 1)
        owners, items = self.artist if kind == "artist" else self.album, ids.numpy()
        kept = uniform(self.draw(f"without {kind}", ids)).numpy() >= _WITHOUT[kind]
        if kind == "album":
            kept[self.hot_items - 1] = True
        pairs = np.stack([owners[kept], items[kept]])
        if kind == "artist":
            second = uniform(self.draw("two artists", ids)).numpy() < _TWO_ARTISTS
            second &= kept & (owners > 1)
            smaller = torch.from_numpy(owners[second] - 1)
            guests = 1 + integers(self.draw("guest", ids[torch.from_numpy(second)]), smaller)
            pairs = np.concatenate([pairs, np.stack([guests.numpy(), items[second]])], axis=1)
        pairs = pairs[:, np.lexsort(pairs[::-1])]
        return pa.table([pa.array(each, pa.uint32()) for each in pairs], [f"{kind}_id", "item_id"])


def _draw_events(
    catalogue: _Catalogue, lengths: LengthDistribution, users: Tensor, hot_album: float
) -> tuple[pa.Table, NDArray[np.float64], NDArray[np.int64]]:
    """Events of a block of users, with their chances [n] to be listened to, and kinds [n]."""
    counts = torch.from_numpy(lengths.draw(catalogue.seed, users))
    owner = torch.repeat_interleave(torch.arange(len(users)), counts)
    place = torch.arange(len(owner)) - (torch.cumsum(counts, 0) - counts)[owner]
    keys = catalogue.draw("event", users[owner], place)

    def draw(number: int) -> NDArray[np.float64]:
        return np.asarray(uniform(derive(keys, number)).numpy())

    times = (draw(0) * (_LAST // _STEP + 1)).astype(np.int64) * _STEP
    order = np.lexsort((times, owner.numpy()))  # the other columns are drawn alike at any place
    ranks = np.searchsorted(catalogue.ends, draw(1), "right").clip(max=catalogue.items - 1)
    items = catalogue.item_of_rank[ranks]
    if hot_album:
        hot = catalogue.hot_items[integers(derive(keys, 3), len(catalogue.hot_items)).numpy()]
        items = np.where(draw(2) < hot_album, hot, items)
    chance = catalogue.find_chances(catalogue.draw_vectors("taste", users)[owner.numpy()], items)
    kind = _choose_kinds(chance, draw(4), draw(5))
    share, long = draw(7), integers(catalogue.draw("length", torch.from_numpy(items)), 50).numpy()
    beyond = np.where(share > 0.99, 101 + 58 * draw(8), 100)
    played = np.where(
        draw(6) < chance, np.where(share < 0.3, LISTENED * (1 + share / 0.3), beyond), 50 * share
    )
    heard = kind != 0
    columns = {
        "uid": pa.array(users[owner].numpy(), pa.uint32()),
        "timestamp": pa.array(times[order], pa.uint32()),
        "item_id": pa.array(items, pa.uint32()),
        "is_organic": pa.array(draw(9) < _ORGANIC).cast(pa.uint8()),
        "played_ratio_pct": pa.array(played.astype(np.uint16), mask=heard),
        "track_length_seconds": pa.array((_STEP * (12 + long)).astype(np.uint32), mask=heard),
        "event_type": pa.DictionaryArray.from_arrays(kind.astype(np.int32), pa.array(KINDS)),
    }
    return pa.table(columns, schema=_SCHEMA), chance, kind


def _choose_kinds(
    chance: NDArray[np.float64], first: NDArray[np.float64], second: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Kinds of events [n] by their chance to be listened to, which likes follow, and two draws."""
    listened = LISTEN_PLUS / (LISTEN_PLUS + SKIP)
    likes = LIKE * chance / listened
    others = (1 - LISTEN_PLUS - SKIP - LIKE) * (1 - chance) / (1 - listened)
    other = 2 + np.searchsorted(np.cumsum(_DISLIKED), second, "right")
    return np.asarray(np.where(first < likes, 1, np.where(first < likes + others, other, 0)))


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x)))


def _find_bias() -> float:
    """The bias with which the mean chance is the share of listens that are listen_plus."""
    points = np.linspace(-8, 8, 4001)
    density = np.exp(-(points**2) / 2)
    density /= density.sum()
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = float((density * _sigmoid(middle + _STRENGTH * points)).sum())
        low, high = (middle, high) if mean < LISTEN_PLUS / (LISTEN_PLUS + SKIP) else (low, middle)
    return high


_BIAS = _find_bias()


def _compute_auc(negatives: NDArray[np.int64], positives: NDArray[np.int64]) -> float:
    """Of counts by ascending bins of the score; ties count half."""
    below = np.cumsum(negatives) - negatives / 2
    pairs = int(negatives.sum()) * int(positives.sum())
    return float((positives * below).sum() / pairs) if pairs else float("nan")
