"""Models of TorchRec's and batches for them. Needs TorchRec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

ROWS = 50
SAMPLES = 12  # no power of two: the division by it rounds


def keyed(keys, seed, samples=SAMPLES, longest=4, weighted=False, rows=ROWS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(keys) * samples,), generator=generator)
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        list(keys),
        torch.randint(0, rows, (total,), generator=generator),
        lengths=lengths.int(),
        weights=torch.rand(total, generator=generator, dtype=dtype) if weighted else None,
    )


def build_dlrm(width: int = 8, device: str | None = None) -> nn.Module:
    """TorchRec's own; the first table is read by two features."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=ROWS + number,
            embedding_dim=width,
            feature_names=["f0", "g0"] if number == 0 else [f"f{number}"],
        )
        for number in range(4)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=device and torch.device(device))
    return DLRMTrain(DLRM(collection, 5, [16, width], [16, 1]))


def dlrm_batch(seed: int, samples: int = SAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.rand(samples, 5, generator=generator),
        keyed(["f3", "f0", "g0", "f1", "f2"], seed, samples),
        torch.randint(0, 2, (samples,), generator=generator),
    )


WIDE = [f"f{number}" for number in range(200)]


class WideModel(nn.Module):
    """200 pooled features, tables of their own but for two that share one; one of them has no ids
    in any batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        tables = [
            EmbeddingBagConfig(
                name=f"t{name}",
                num_embeddings=ROWS,
                embedding_dim=4,
                feature_names=[name, WIDE[-1]] if name == WIDE[0] else [name],
            )
            for name in WIDE[:-1]
        ]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.out = nn.Linear(4 * len(WIDE), 1)

    def forward(self, batch: Batch):
        logits = self.out(torch.tanh(self.bags(batch.sparse_features).values())).squeeze(1)
        logits = logits + batch.dense_features.sum(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float()), logits


def wide_batch(seed: int, samples: int = SAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(WIDE), samples), generator=generator)
    lengths[7] = 0
    return Batch(
        torch.rand(samples, 1, generator=generator),
        KeyedJaggedTensor(
            WIDE,
            torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator),
            lengths=lengths.view(-1),
        ),
        torch.randint(0, 2, (samples,), generator=generator),
    )


@dataclass(frozen=True)
class Mixed:
    """Not TorchRec's: nested, with all kinds of leaves."""

    features: dict[str, KeyedJaggedTensor]
    times: JaggedTensor
    labels: tuple[torch.Tensor, torch.Tensor]
    scale: torch.Tensor  # one for the batch
    name: str = "mixed"
    nothing: None = None


class MixedModel(nn.Module):
    """Pooled, weighted, averaged and sequence features; a table in two collections' features, a
    feature in two tables; features that the model permutes before it reads them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)

        def bags(names, weighted=False, pooling=PoolingType.SUM):
            tables = [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=ROWS,
                    embedding_dim=width,
                    feature_names=features,
                    pooling=pooling,
                )
                for name, width, features in names
            ]
            return EmbeddingBagCollection(tables=tables, is_weighted=weighted)

        self.pooled = bags([("a", 4, ["u", "v"]), ("b", 6, ["v"])])
        self.averaged = bags([("c", 4, ["u2"])], pooling=PoolingType.MEAN)
        self.weighted = bags([("d", 4, ["w"])], weighted=True)
        self.sequences = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name="e", num_embeddings=ROWS, embedding_dim=4, feature_names=["h", "h2"]
                )
            ],
            need_indices=True,
        )
        self.out = nn.Linear(4 + 4 + 6 + 4 + 4 + 3 * 4, 1)
        self.to(dtype)

    def forward(self, batch: Mixed):
        user, item = batch.features["user"], batch.features["item"]
        assert batch.name == "mixed" and batch.nothing is None and batch.scale.dim() == 0
        parts = [self.pooled(user).values(), self.averaged(user)["u2"]]
        parts.append(self.weighted(item).values())
        item_first = item.permute([2, 0, 1])
        rows = self.sequences(item_first)
        for name in ("h", "h2"):
            values, lengths = rows[name].values(), rows[name].lengths()
            assert torch.equal(rows[name].weights().long(), item[name].values())
            weighted = values * item[name].weights()[:, None].to(values.dtype)
            sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
            zeros = torch.zeros(len(lengths), 4, dtype=values.dtype)
            parts.append(zeros.index_add(0, sample, torch.tanh(weighted)))
        times = batch.times
        sample = torch.repeat_interleave(
            torch.arange(times.lengths().numel()), times.lengths().long()
        )
        summed = torch.zeros(times.lengths().numel(), 4, dtype=parts[0].dtype)
        parts.append(summed.index_add(0, sample, times.values().to(summed.dtype)))
        logits = self.out(torch.cat(parts, dim=1)).squeeze(1) * batch.scale
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels[0].to(logits.dtype), reduction="none"
        )
        weight = batch.labels[1].to(logits.dtype)
        return (losses * weight).sum() / weight.sum(), {"logits": logits}


def mixed_batch(seed: int, samples: int = SAMPLES) -> Mixed:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3, (samples,), generator=generator)
    times = torch.rand(int(lengths.sum()), 4, generator=generator)
    return Mixed(
        {
            "user": keyed(["v", "u", "u2"], seed, samples),
            "item": keyed(["h", "w", "h2"], seed + 1, samples, weighted=True),
        },
        JaggedTensor(times, lengths=lengths),
        (
            torch.randint(0, 2, (samples,), generator=generator),
            torch.rand(samples, generator=generator) + 0.1,
        ),
        torch.tensor(0.5),
    )


def pick(batch, index):
    """The samples of a batch at `index`, by TorchRec's own means: an oracle of what is moved."""

    def of_keyed(features):
        parts = [features[key] for key in features.keys()]  # noqa: SIM118
        return KeyedJaggedTensor.from_jt_dict(
            {key: of_jagged(part) for key, part in zip(features.keys(), parts, strict=True)}
        )

    def of_jagged(part):
        values = part.to_dense()
        weights = part.to_dense_weights() if part.weights_or_none() is not None else None
        return JaggedTensor(
            torch.cat([values[i] for i in index]),
            lengths=part.lengths()[torch.tensor(index)],
            weights=None if weights is None else torch.cat([weights[i] for i in index]),
        )

    if isinstance(batch, Batch):
        rows = torch.tensor(index)
        return Batch(
            batch.dense_features[rows], of_keyed(batch.sparse_features), batch.labels[rows]
        )
    rows = torch.tensor(index)
    return Mixed(
        {name: of_keyed(features) for name, features in batch.features.items()},
        of_jagged(batch.times),
        tuple(label[rows] for label in batch.labels),
        batch.scale,
    )
