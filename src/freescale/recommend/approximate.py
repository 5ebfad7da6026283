"""Approximate search: an index of item vectors that is built and measured at export. With millions
of items it finds most of the best ones in a fraction of the time."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from freescale.kernels.best_items import find_best

INDEX, ABOUT = "index.faiss", "index.json"
# HNSW: neighbours of an item, and how many are looked at to find them
_LINKS, _BUILD_EFFORT = 32, 80
# items that a search looks at; the first that suffices
_EFFORTS = (16, 32, 64, 128, 256, 512, 1024)
_PLACES = 10  # recall@10


class ApproximateIndex:
    """An index of the items that can be recommended.

    Attributes:
        about: what it is and how good: `recall@10`, `effort`, `queries`.
    """

    def __init__(self, index: Any, about: dict[str, Any]) -> None:
        self._index, self.about = index, about
        index.hnsw.efSearch = about["effort"]

    @staticmethod
    def build(vectors: Tensor, queries: Tensor, floor: float) -> ApproximateIndex:
        """Builds an index of vectors [n, width], and searches with as little effort as has the
        recall `floor` on queries [q, width].

        Raises:
            ValueError: no effort reaches it.
        """
        faiss = import_faiss()
        items, wanted = (each.cpu().numpy() for each in (vectors, queries))
        index = faiss.IndexHNSWFlat(items.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _BUILD_EFFORT
        index.add(items)
        k, recall = min(_PLACES, len(items)), 0.0
        best = find_best(queries, vectors, k)[1].cpu().numpy()
        for effort in _EFFORTS:
            index.hnsw.efSearch = effort
            found = index.search(wanted, k)[1]
            recall = float((found[:, :, None] == best[:, None, :]).any(2).mean())
            if recall >= floor:
                about = {
                    "kind": "HNSW",
                    "effort": effort,
                    "queries": len(wanted),
                    "items": len(items),
                }
                return ApproximateIndex(index, {**about, "recall@10": recall})
        raise ValueError(
            f"approximate search finds {recall:.1%} of the best ten items, less than the floor of "
            f"{floor:.1%}: lower it with --min-recall, or search exactly"
        )

    def search(self, queries: Tensor, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores [q, k], falling, and places [q, k] of the items; -1 behind the last."""
        self._index.hnsw.efSearch = max(self.about["effort"], k)
        scores, places = self._index.search(queries.cpu().numpy(), k)
        return scores, places

    def write(self, folder: Path) -> list[Path]:
        import_faiss().write_index(self._index, str(folder / INDEX))
        (folder / ABOUT).write_text(json.dumps(self.about, indent=1) + "\n", encoding="utf-8")
        return [folder / INDEX, folder / ABOUT]

    @staticmethod
    def read(folder: Path) -> ApproximateIndex:
        """ValueError if the folder has none."""
        if not (folder / INDEX).is_file():
            raise ValueError(
                f"{folder} has no index for approximate search: make one with "
                "`freescale export RUN --out FOLDER --index`"
            )
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        return ApproximateIndex(import_faiss().read_index(str(folder / INDEX)), about)


def import_faiss() -> ModuleType:
    try:
        import faiss
    except ImportError:
        raise ValueError(
            "approximate search needs faiss: pip install 'freescale[search]'"
        ) from None
    return faiss
