"""TorchRec's batches as `SequenceBatch`es, whose samples can be selected, moved between ranks and
copied to a device, and back.

    KeyedJaggedTensor   a sequence for each key, with its weights if it has some
    JaggedTensor        a sequence
    Tensor              [samples, ...], or named in `shared`: the same for all samples of a batch
    None, numbers, text constants: every batch has the same

The first batch determines the form of the others. Features are named by the keys of
KeyedJaggedTensors, other leaves by their path in the batch (`labels`, `user.age`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from freescale.batch import Jagged, SequenceBatch

TASK = "loss"
_CONSTANTS = (type(None), bool, int, float, str, bytes, Enum, torch.dtype, torch.device)


@dataclass(frozen=True)
class _Leaf:
    """One leaf of a batch, without its values."""

    path: str
    kind: str  # keyed, jagged, dense, shared or constant
    keys: tuple[str, ...] = ()  # of a keyed one
    weighted: bool = False
    lengths: torch.dtype = torch.int64
    scalar: bool = False  # of a shared one: has no axis
    constant: Any = None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of its sequences."""
        return self.keys if self.kind == "keyed" else (self.path,)


@dataclass(frozen=True)
class _Announced:
    """A KeyedJaggedTensor of the current batch, and the announced ids of its features."""

    features: Any
    version: int
    ids: dict[str, Tensor]


class BatchForm:
    """The form of a run's batches; `shared` and `loss_weight` as in `parallelize`."""

    def __init__(
        self, shared: Sequence[str] = (), loss_weight: str | Callable[[Any], Tensor] | None = None
    ) -> None:
        if isinstance(shared, str):
            raise ValueError(f"shared={shared!r} must be a list of paths, [{shared!r}]")
        self._shared, self._loss_weight = tuple(shared), loss_weight
        self._fill: Fill | None = None
        self._leaves: list[_Leaf] = []
        self._announced: list[_Announced] = []

    # ---- to a SequenceBatch

    def encode(self, batch: Any, number: int = 0) -> SequenceBatch:
        """Converts a batch of the data; shares its memory. TypeError or ValueError if a part of it
        cannot be moved sample by sample, or differs from the first batch."""
        fill, found = take_apart(batch, _is_leaf)
        samples = _count_samples(found, self._shared)
        leaves = [self._describe(path, value, samples) for path, value in found]
        if self._fill is None:
            self._check_names(leaves)
            self._fill, self._leaves = fill, leaves
        else:
            _compare(self._leaves, leaves)
        sequences: dict[str, Jagged] = {}
        dense: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        for leaf, (_, value) in zip(leaves, found, strict=True):
            if leaf.kind in ("keyed", "jagged"):
                sequences |= _split_sequences(leaf, value, samples)
                if leaf.kind == "jagged":
                    sequences[leaf.path].check(leaf.path)
            elif leaf.kind == "dense":
                dense[leaf.path] = value
            elif leaf.kind == "shared":
                shared[leaf.path] = value.reshape(1) if leaf.scalar else value
        encoded = SequenceBatch(sequences=sequences, dense=dense, shared=shared, number=number)
        weights = self._find_weights(batch, dense, samples).to(encoded.device)
        return replace(encoded, weights={TASK: weights})

    def _describe(self, path: str, value: Any, samples: int) -> _Leaf:
        if isinstance(value, (KeyedJaggedTensor, JaggedTensor)):
            keyed = isinstance(value, KeyedJaggedTensor)
            kind, keys = ("keyed", tuple(value.keys())) if keyed else ("jagged", ())
            weighted = value.weights_or_none() is not None
            return _Leaf(path, kind, keys, weighted, value.lengths().dtype)
        if isinstance(value, Tensor):
            if path in self._shared:
                return _Leaf(path, "shared", scalar=not value.dim())
            if not value.dim() or value.shape[0] != samples:
                raise ValueError(
                    f"tensor {path!r} of the batch has shape {list(value.shape)}, and the batch "
                    f"has {samples} samples: its first axis must be the samples; if it belongs to "
                    f"the batch as a whole, name it: parallelize(..., shared=[{path!r}])"
                )
            return _Leaf(path, "dense")
        if isinstance(value, _CONSTANTS):
            return _Leaf(path, "constant", constant=value)
        raise TypeError(
            f"{path!r} of the batch is a {type(value).__name__}: batches are dataclasses, named "
            "tuples, dicts, lists and tuples of KeyedJaggedTensor, JaggedTensor and tensors"
        )

    def _check_names(self, leaves: Sequence[_Leaf]) -> None:
        owner: dict[str, str] = {}
        for leaf in leaves:
            for name in leaf.features if leaf.kind in ("keyed", "jagged") else ():
                if name in owner:
                    raise ValueError(
                        f"feature {name!r} is in {owner[name]!r} and in {leaf.path!r} of the "
                        "batch: rename one of them, tables are read by the names of features"
                    )
                owner[name] = leaf.path
        paths = [leaf.path for leaf in leaves if leaf.kind == "shared"]
        unknown = [path for path in self._shared if path not in paths]
        if unknown:
            known = [leaf.path for leaf in leaves if leaf.kind in ("dense", "shared")]
            raise ValueError(
                f"shared names {unknown[0]!r}, which is no tensor of the batch; its tensors are "
                f"{', '.join(known) or 'none'}"
            )

    def _find_weights(self, batch: Any, dense: dict[str, Tensor], samples: int) -> Tensor:
        wanted = self._loss_weight
        if wanted is None:
            return torch.ones(samples)
        if isinstance(wanted, str):
            if wanted not in dense:
                raise ValueError(
                    f"loss_weight names {wanted!r}; tensors [samples] of the batch are "
                    f"{', '.join(dense) or 'none'}"
                )
            weights = dense[wanted]
        else:
            weights = wanted(batch)
        if not isinstance(weights, Tensor) or weights.shape != (samples,):
            shape = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(
                f"loss_weight gives {shape}: give a tensor with one weight for each of the "
                f"{samples} samples"
            )
        return weights.detach().float()

    # ---- and back

    def decode(self, batch: SequenceBatch) -> Any:
        """Converts the batch back to the model's form, on its device."""
        if self._fill is None:
            raise RuntimeError(
                "samples came to a rank that has had no batch of its own, and does not know their "
                "form: give every rank a batch in the first step"
            )
        self._announced = []
        return self._fill(self._join_leaf(leaf, batch) for leaf in self._leaves)

    def _join_leaf(self, leaf: _Leaf, batch: SequenceBatch) -> Any:
        if leaf.kind == "constant":
            return leaf.constant
        if leaf.kind == "dense":
            return batch.dense[leaf.path]
        if leaf.kind == "shared":
            value = batch.shared[leaf.path]
            return value.reshape(()) if leaf.scalar else value
        parts = [batch.sequences[name] for name in leaf.features]
        lengths = torch.cat([part.lengths for part in parts]).to(leaf.lengths)
        weights = None
        if leaf.weighted:
            weights = torch.cat([batch.sequences[_name_weights(n)].values for n in leaf.features])
        if leaf.kind == "jagged":
            return JaggedTensor(parts[0].values, lengths=lengths, weights=weights)
        features = KeyedJaggedTensor(
            list(leaf.keys),
            torch.cat([part.values for part in parts]),
            weights=weights,
            lengths=lengths,
            stride=len(batch),
            length_per_key=[part.values.shape[0] for part in parts],  # saves reading them
        )
        ids = {name: part.values for name, part in zip(leaf.keys, parts, strict=True)}
        self._announced.append(_Announced(features, features.values()._version, ids))
        return features

    def find_announced(self, features: Any) -> dict[str, Tensor] | None:
        """The announced ids of a KeyedJaggedTensor, by key, which the tables need not search. None
        if it is not the batch's own."""
        for known in self._announced:
            if known.features is features and features.values()._version == known.version:
                return known.ids
        return None


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, KeyedJaggedTensor, JaggedTensor))


def _name_weights(feature: str) -> str:
    return f"{feature}/weights"


def _count_samples(found: Sequence[tuple[str, Any]], shared: Sequence[str]) -> int:
    """The samples of a batch, by its jagged leaves or else its tensors."""
    sizes: dict[str, int] = {}
    for path, value in found:
        if isinstance(value, KeyedJaggedTensor):
            _refuse_own_batch_sizes(path, value)
            sizes[path] = value.stride()
        elif isinstance(value, JaggedTensor):
            sizes[path] = value.lengths().numel()
    if not sizes:
        sizes = {
            path: value.shape[0]
            for path, value in found
            if isinstance(value, Tensor) and value.dim() and path not in shared
        }
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"parts of the batch differ in their number of samples: {sizes}; a tensor that belongs "
            "to the batch as a whole is named in parallelize(..., shared=[...])"
        )
    return next(iter(sizes.values()), 0)


def _refuse_own_batch_sizes(path: str, features: Any) -> None:
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise ValueError(
            f"{path!r} of the batch has a batch size of its own for each feature "
            "(stride_per_key_per_rank, inverse_indices), which is not supported: expand it to one "
            "batch size"
        )


def _compare(first: Sequence[_Leaf], leaves: Sequence[_Leaf]) -> None:
    """Raises a ValueError unless a batch has the form of the first one."""
    before = {leaf.path: leaf for leaf in first}
    for leaf in leaves:
        if leaf.path not in before:
            raise ValueError(f"the batch has {leaf.path!r}, which the first batch had not")
        known = before[leaf.path]
        if leaf == known:
            continue
        if leaf.kind == known.kind == "constant":
            raise ValueError(
                f"{leaf.path!r} is {leaf.constant!r} in this batch and was {known.constant!r} in "
                "the first: what changes has to be a tensor"
            )
        raise ValueError(f"{leaf.path!r} is {leaf} in this batch and was {known} in the first")
    if len(leaves) != len(first):
        missing = sorted(set(before) - {leaf.path for leaf in leaves})
        raise ValueError(f"the batch lacks {', '.join(missing)}, which the first batch had")


def _split_sequences(leaf: _Leaf, value: Any, samples: int) -> dict[str, Jagged]:
    """The sequences of a jagged leaf, as views of its values."""
    features = leaf.features
    lengths = value.lengths().long().view(len(features), samples)
    sizes = value.length_per_key() if leaf.kind == "keyed" else [value.values().shape[0]]
    columns = [(features, value.values())]
    if leaf.weighted:
        columns.append((tuple(map(_name_weights, features)), value.weights()))
    return {
        name: Jagged(part, each)
        for names, values in columns
        for name, part, each in zip(names, torch.split(values, sizes), lengths, strict=True)
    }


Path = str  # path of a leaf: "sparse_features", "user.ids", "labels[0]"
Fill = Callable[[Iterator[Any]], Any]  # puts a batch together from its leaves, in their order


def take_apart(batch: Any, is_leaf: Callable[[Any], bool]) -> tuple[Fill, list[tuple[Path, Any]]]:
    """A function that fills the structure of a batch with other leaves, and its leaves with their
    paths. A batch may itself be a leaf."""
    leaves: list[tuple[Path, Any]] = []

    def visit(value: Any, path: Path) -> Fill:
        found = None if is_leaf(value) else _list_parts(value)
        if found is None:
            leaves.append((path or "batch", value))
            return next
        names, values, build = found
        fills = [visit(part, _join(path, name)) for name, part in zip(names, values, strict=True)]
        return lambda others: build([fill(others) for fill in fills])

    return visit(batch, ""), leaves


def _join(path: Path, name: Any) -> Path:
    if isinstance(name, int):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else str(name)


def _list_parts(
    value: Any,
) -> tuple[Sequence[Any], Sequence[Any], Callable[[list[Any]], Any]] | None:
    """(names, parts, a function that rebuilds it from parts); None for a leaf."""
    kind = type(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        # a copy without the parts; a constructor might need other arguments
        empty = _with_fields(value, dict.fromkeys(names))
        return (
            names,
            [getattr(value, name) for name in names],
            lambda parts: _with_fields(empty, dict(zip(names, parts, strict=True))),
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._fields, list(value), lambda parts: kind(*parts)
    if isinstance(value, dict):
        keys = list(value)
        none = copy.copy(value)
        none.clear()  # no constructor: a defaultdict needs another argument
        return (
            keys,
            [value[key] for key in keys],
            lambda parts: _with_items(none, zip(keys, parts, strict=True)),
        )
    if isinstance(value, (list, tuple)):
        return range(len(value)), list(value), lambda parts: kind(parts)
    return None


def _with_items(value: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    made = copy.copy(value)
    made.update(items)
    return made


def _with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    made = copy.copy(value)
    for name, part in fields.items():
        object.__setattr__(made, name, part)  # frozen ones too
    return made
