"""Rank slices of global batches, from a flat table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from freescale.batch import SequenceBatch
from freescale.config.columns import parse_labels
from freescale.data.batches.epoch_order import EpochOrder
from freescale.data.batches.global_batches import GlobalBatches
from freescale.data.batches.specs import ReadSpec
from freescale.data.features.fitting import FIRST_KNOWN, to_json
from freescale.data.flat.schema import IDS, FlatRows, Schema, Source
from freescale.data.ingest.digest import compute_digest, read_contents
from freescale.data.labels import make_label
from freescale.data.values import parse_numbers, refuse_any
from freescale.data.workspace import make_folder
from freescale.folders import find_cache_folder
from freescale.random import derive

_VERSION = 1
_GROUP = 1 << 14  # rows next to each other; the order mixes ReadSpec.shuffle_groups of them
_ROWS = "rows.npy"


class FlatTable(GlobalBatches):
    """Iterable of one rank's batches of a flat table, of which every row is a sample.

    An epoch has each row once, over all ranks. Ranks have equally many batches; those of one step
    differ by at most one row, and may be empty.

    | dense                             | [samples]                                               |
    |-----------------------------------|---------------------------------------------------------|
    | `user`, `item`                    | rows of a table                                         |
    | `user_own`, `item_own`            | 1 if the training part has it, else 0                   |
    | `user_features`, `item_features`  | [., places] rows of the table of these features         |
    | other features, by name           | rows of a table each; [., places] of kind multi         |
    | `labels`                          | [., labels] float32                                     |

    Weights of a label are 1 or a column. The first use encodes the rows, with 4 bytes a place,
    label and weight, into a file of the cache, which ranks map into memory. They hold the order of
    two windows: 8 bytes for each row of `ReadSpec.shuffle_groups` groups of 16,384.

    Args:
        source: a file, a folder, a pattern or several, of any format.
        schema: fitted.
        global_batch: rows of a batch over all ranks.
        labels: columns of numbers, or comparisons: `click,like=rating>=4`.
        weights: the columns with the weights of labels, by label.
        where: which rows count, as `day>=20`.
        rank: this rank.
        world: number of ranks.
        read: order and epochs.
        cache: folder of encoded tables. None: the user's.

    Raises:
        ValueError: a column or value is not valid; with file, row, column and value.
    """

    def __init__(
        self,
        source: Source,
        schema: Schema,
        global_batch: int,
        *,
        labels: str = "",
        weights: Mapping[str, str] | None = None,
        where: str = "",
        rank: int = 0,
        world: int = 1,
        read: ReadSpec | None = None,
        cache: str | Path | None = None,
    ) -> None:
        super().__init__(global_batch, rank, world, read or ReadSpec())
        self.schema, self._labels, self._weights = schema, parse_labels(labels), dict(weights or {})
        self.tasks = tuple(label.name for label in self._labels)
        if unknown := [name for name in self._weights if name not in self.tasks]:
            raise ValueError(f"weights of {', '.join(unknown)}: the labels are {labels or 'none'}")
        rows, cache = FlatRows(source, where), Path(cache or find_cache_folder())
        files = [file.path for file in rows.files]
        contents = read_contents(files, cache / "digests", lambda share: None)
        about = [[each.digest for each in contents], [file.member for file in rows.files], where]
        about += [[label.text for label in self._labels], self._weights]
        fitted = {name: to_json(of) for name, of in schema.get_tables().items()}
        self.fingerprint = compute_digest(_VERSION, about, fitted)

        def write(folder: Path) -> None:
            self._write(rows, folder / _ROWS)
            for content in contents:
                content.check_unchanged()

        self._folder = make_folder(cache, f"table-{self.fingerprint}", f"{rows.files[0]}", write)
        self._open()
        self._seek(self.read.start)

    def _write(self, rows: FlatRows, path: Path) -> None:
        names, count = [label.column for label in self._labels], 0
        header = {"descr": "<i4", "fortran_order": False}
        with open(path, "wb") as file:
            for block in rows.read([*self.schema.columns, *names, *self._weights.values()]):
                numbers = [block.convert(x.column, partial(make_label, x)) for x in self._labels]
                numbers += [block.convert(name, _read_weights) for name in self._weights.values()]
                bits = [np.asarray(x, np.float32).view(np.int32)[:, None] for x in numbers]
                part = np.concatenate([self.schema.encode(block), *bits], axis=1)
                if not file.tell():  # the number of rows follows, in as many bytes
                    shape = {"shape": (0, part.shape[1])}
                    np.lib.format.write_array_header_1_0(file, header | shape)
                part.tofile(file)
                count += len(part)
            if not count:
                raise ValueError(f"{rows.files[0]}: no row is left; choose others with where")
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, header | {"shape": (count, part.shape[1])})

    def _open(self) -> None:
        self._rows = np.load(self._folder / _ROWS, mmap_mode="r")  # [rows, places and numbers]
        starts = [*range(0, self.num_samples, _GROUP), self.num_samples]
        self._order = EpochOrder(torch.tensor(starts), self.read)

    def __getstate__(self) -> dict[str, Any]:
        """For another process: without the mapped file."""
        return {k: v for k, v in vars(self).items() if k not in ("_rows", "_order")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    @property
    def num_samples(self) -> int:
        return len(self._rows)

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"fingerprint": self.fingerprint}

    def batch(self, number: int) -> SequenceBatch:
        epoch, first, _, low, high = self._find_slice(number)
        samples = self._order.samples(epoch, first + low, first + high)
        rows, place = torch.from_numpy(self._rows[samples.numpy()]), 0
        dense: dict[str, Tensor] = {}
        for name, of in self.schema.tables.items():
            width = sum(fitted.places for fitted in of)
            part = rows[:, place : place + width].long()
            shared = of[0].feature.source in IDS and name not in IDS
            dense[name] = part if shared or of[0].feature.kind == "multi" else part[:, 0]
            if name in IDS:
                dense[f"{name}_own"] = (dense[name] >= of[0].first + FIRST_KNOWN).float()
            place += width
        numbers = rows[:, place:].contiguous().view(torch.float32).T.contiguous()
        weights = {task: torch.ones(len(samples)) for task in self.tasks}
        weights |= dict(zip(self._weights, numbers[len(self.tasks) :], strict=True))
        if self.tasks:
            dense["labels"] = numbers[: len(self.tasks)].T.contiguous()
        keys = derive(self.read.seed, number, samples)
        return SequenceBatch(dense=dense, weights=weights, keys=keys, number=number)


def _read_weights(values: pa.Array) -> pa.Array:
    numbers = parse_numbers(values)
    problem = "holds {!r}, and weights are 0 or more"
    refuse_any(pc.less(numbers, 0), values, problem, "fix that value")
    return numbers
