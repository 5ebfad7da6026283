"""TorchRec's own, unmodified DLRM with pooled tables, and its batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from freescale.embedding.layout import TableSpec
from freescale.embedding.storage.api import draw_initial_rows

COLLECTION = "model.sparse_arch.embedding_bag_collection"  # path of its tables
ROW_EPSILON, DENSE_LR = 1e-8, 0.05
SEED = 1  # of the initial rows


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and its batches.

    Attributes:
        factor: ids per sample and table; 1 as in Criteo.
        popularity: exponent of the Zipf distribution of ids.
    """

    tables: int = 26
    rows: int = 100_000
    width: int = 64
    samples: int = 512  # per rank
    factor: int = 1
    popularity: float = 1.05
    dense: int = 13
    bottom: tuple[int, ...] = (256, 128)
    top: tuple[int, ...] = (256, 128, 1)
    batches: int = 8  # distinct batches, repeated

    @property
    def row_lr(self) -> float:
        """Smaller for large factors: all ids of a bag change its sum."""
        return 0.02 / self.factor

    @property
    def deviation(self) -> float:
        """Standard deviation of initial rows: sums have the same size for every factor."""
        return float(0.05 / self.factor**0.5)

    @property
    def features(self) -> list[str]:
        return [f"f{number}" for number in range(self.tables)]


def build_dlrm(shape: Shape, device: str | torch.device | None = None) -> nn.Module:
    """Builds DLRM. `device`: of the tables; other weights are on the CPU."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=shape.rows,
            embedding_dim=shape.width,
            feature_names=[feature],
        )
        for number, feature in enumerate(shape.features)
    ]
    made: nn.Module = DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=tables, device=device and torch.device(device)),
            dense_in_features=shape.dense,
            dense_arch_layer_sizes=[*shape.bottom, shape.width],
            over_arch_layer_sizes=list(shape.top),
        )
    )
    return made


def draw_zipf(count: int, rows: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Draws [count] ids. The probability of rank r falls as r ** -exponent, by inverting the
    continuous distribution. A multiplier scatters ranks over the ids."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    rest = 1 - exponent
    ranks = (1 + uniform * ((rows + 1) ** rest - 1)) ** (1 / rest) if rest else rows**uniform
    return (ranks.long().clamp_(1, rows) - 1) * 7919 % rows


def make_batch(shape: Shape, seed: int) -> Batch:
    """Makes a batch with `factor` ids per sample and table."""
    generator = torch.Generator().manual_seed(seed)
    count = shape.tables * shape.samples
    ids = draw_zipf(count * shape.factor, shape.rows, shape.popularity, generator)
    return Batch(
        torch.rand(shape.samples, shape.dense, generator=generator),
        KeyedJaggedTensor(
            shape.features, ids, lengths=torch.full((count,), shape.factor, dtype=torch.int32)
        ),
        torch.randint(0, 2, (shape.samples,), generator=generator),
    )


def list_batches(shape: Shape, rank: int, world: int) -> list[Batch]:
    """Lists the batches of a rank, which it repeats."""
    return [make_batch(shape, number * world + rank) for number in range(shape.batches)]


def draw_rows(shape: Shape, table: str, ids: Tensor) -> Tensor:
    """Draws initial rows [n, width] of a table, given by its path in the model."""
    spec = TableSpec(table, shape.rows, shape.width, torch.float32, ())
    parts = torch.split(ids, 1 << 14)
    return torch.cat([draw_initial_rows(spec, part, SEED, shape.deviation) for part in parts])
