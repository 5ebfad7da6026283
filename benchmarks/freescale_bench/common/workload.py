"""The work that every arm of a benchmark does: batches, the table's first values, and the dense
layers.

Imports torch and numpy (and, for a model with attention, FreeScale's plain HSTU), so that it runs
in the peer's environment as well as in ours. Everything here is a
function of the workload, the rank and the number of ranks: two arms that are given the same
workload see the same ids, start from the same weights and are asked for the same update,

    loss = sum over the samples of all ranks / number of samples of all ranks

with dense gradients summed over ranks and row gradients summed at the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

RowOptimizer = Literal["sgd", "adagrad", "rowwise_adagrad"]
ROW_OPTIMIZERS: tuple[RowOptimizer, ...] = ("sgd", "adagrad", "rowwise_adagrad")

# what a random stream is for: streams of different uses never coincide
_BATCH, _PERMUTATION, _DENSE = 1, 2, 3


@dataclass(frozen=True)
class Workload:
    """One table, log-normal history lengths, a token-wise MLP. Sizes are per rank unless they say
    otherwise."""

    rows: int = 1_000_000  # of the whole table
    width: int = 128
    samples: int = 64
    median_length: float = 200.0
    sigma: float = 1.0  # of the logarithm of the lengths
    maximum_length: int = 2000
    # Zipf's exponent; or every id once within a rank's batch, all alike or by the logarithm of
    # their rank, which is close to an exponent of 1 and needs no table of all ids
    popularity: float | Literal["unique", "unique log"] = "unique"
    # instead of a popularity: every id once in a global batch, this share also in the one before
    collisions: float | None = None
    hidden: tuple[int, ...] = (256,)  # the MLP is width - hidden... - width
    # times that the MLP is applied; all but the last are residual, and share its weights
    passes: int = 1
    layers: int = 0  # of HSTU, instead of the MLP; the rows are projected to its width first
    inner: int = 64  # HSTU's width
    heads: int = 2
    steps: int = 20
    seed: int = 0
    row_optimizer: RowOptimizer = "adagrad"
    row_learning_rate: float = 0.05
    # Adagrad: row -= rate * gradient / (sqrt(accumulator) + epsilon), accumulator from 0
    row_epsilon: float = 1e-8
    dense_learning_rate: float = 0.05  # of plain SGD

    def __post_init__(self) -> None:
        if self.row_optimizer not in ROW_OPTIMIZERS:
            raise ValueError(
                f"row_optimizer {self.row_optimizer!r} is not one of {', '.join(ROW_OPTIMIZERS)}"
            )
        if isinstance(self.popularity, str) and self.popularity not in ("unique", "unique log"):
            raise ValueError(
                f"popularity {self.popularity!r} is neither a Zipf exponent nor 'unique' nor "
                "'unique log'"
            )
        if isinstance(self.popularity, str) and self.rows < self.samples * self.maximum_length:
            raise ValueError(
                f"{self.rows} rows cannot give {self.samples} x {self.maximum_length} different "
                "ids; ask for more rows"
            )
        if self.collisions is not None and (
            self.popularity != "unique" or not 0 <= self.collisions <= 1
        ):
            raise ValueError(f"collisions is a share of unique ids, not as in {self}")
        if (
            min(self.rows, self.width, self.samples, self.maximum_length, self.steps, self.passes)
            < 1
        ):
            raise ValueError(
                "rows, width, samples, maximum_length, steps and passes are at "
                f"least 1, not as in {self}"
            )


def _stream(workload: Workload, *key: int) -> np.random.Generator:
    return np.random.default_rng((workload.seed, *key))


def make_batches(workload: Workload, rank: int, world: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """This rank's batches: (ids int64 [tokens], lengths int64 [samples], labels float32 [samples])
    for each step."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of {world} ranks")
    cumulative = permutation = None
    if not isinstance(workload.popularity, str):
        weights = np.arange(1, workload.rows + 1, dtype=np.float64) ** -float(workload.popularity)
        cumulative = np.cumsum(weights) / weights.sum()
        # Popular rows lie anywhere in the table, so that row-wise shards have equal loads.
        permutation = _stream(workload, _PERMUTATION).permutation(workload.rows)
    result = []
    for step in range(workload.steps):
        random = _stream(workload, _BATCH, step, rank)
        lengths = _lengths(workload, random)
        tokens = int(lengths.sum())
        if workload.collisions is not None:
            ids = _colliding(workload, step, rank, world)
        elif workload.popularity == "unique log":
            ids = _draw_by_logarithm(random, workload.rows, tokens)
        elif cumulative is None or permutation is None:
            ids = random.choice(workload.rows, tokens, replace=False, shuffle=True).astype(np.int64)
        else:
            places = np.searchsorted(cumulative, random.random(tokens), side="right")
            ids = permutation[np.minimum(places, workload.rows - 1)].astype(np.int64)
        labels = (random.random(workload.samples) < 0.5).astype(np.float32)
        result.append((torch.from_numpy(ids), torch.from_numpy(lengths), torch.from_numpy(labels)))
    return result


def _draw_by_logarithm(random: np.random.Generator, rows: int, count: int) -> npt.NDArray[np.int64]:
    """The first `count` different rows of a sequence in which the logarithm of a row's rank is
    drawn evenly. Row number (r - 1) * step mod rows has rank r: popular rows lie anywhere."""
    step = next(step for step in (7919, 7907, 1) if np.gcd(step, rows) == 1)
    drawn: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    while True:
        more = np.exp(random.random(3 * count) * np.log(rows + 1.0)).astype(np.int64) - 1
        drawn = np.concatenate([drawn, np.minimum(more, rows - 1)])
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if first.size >= count:
            return drawn[first[:count]] * step % rows


def _lengths(workload: Workload, random: np.random.Generator) -> np.ndarray:
    drawn = np.exp(random.normal(np.log(workload.median_length), workload.sigma, workload.samples))
    return np.clip(np.rint(drawn), 1, workload.maximum_length).astype(np.int64)


def _colliding(workload: Workload, step: int, rank: int, world: int) -> np.ndarray:
    """This rank's ids of a step whose global batch shares `workload.collisions` of its rows with
    the one before and the one after.

    Rows lie on a circle, each once; a global batch is an arc of it, and the next one's arc begins
    that share before its end. So the last step of the workload is followed by its first like any
    other, and up to a share of 1/2 only neighbours have rows in common. Which rank asks for which
    row of the arc is drawn anew in every step.
    """
    assert workload.collisions is not None
    keys = [(number, other) for number in range(workload.steps) for other in range(world)]
    tokens = np.array(
        [_lengths(workload, _stream(workload, _BATCH, *key)).sum() for key in keys]
    ).reshape(workload.steps, world)
    arcs = tokens.sum(1)
    # from an arc's beginning to the next one's
    shifts = np.rint(arcs * (1 - workload.collisions)).astype(np.int64)
    circle = int(max(arcs.max(), shifts.sum()))
    if circle > workload.rows or (shifts.sum() and shifts.sum() < 2 * arcs.max()):
        raise ValueError(
            f"{workload.rows} rows and {workload.steps} steps are too few for a "
            f"circle of {circle} rows"
        )
    order = _stream(workload, _PERMUTATION).permutation(workload.rows)[:circle]
    whole = order[(shifts[:step].sum() + np.arange(arcs[step])) % circle]
    _stream(workload, _BATCH, step).shuffle(whole)
    begin = tokens[step, :rank].sum()
    mine: npt.NDArray[np.int64] = whole[begin : begin + tokens[step, rank]].astype(np.int64)
    return mine


def make_table_rows(workload: Workload, rows: Tensor) -> Tensor:
    """First values of the given rows, [n] int64 -> [n, width] float32 in [-0.1, 0.1): a function of
    row and column."""
    columns = torch.arange(workload.width, device=rows.device)
    bits = (
        rows[:, None] * workload.width + columns + workload.seed * 1_000_003
    ) * 6364136223846793005
    bits = (bits ^ (bits >> 29)) * 1442695040888963407
    # 24 bits are what a float32 holds exactly, so the value does not depend on how it is converted.
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32).mul_(0.2 / 2**24).sub_(0.1)


def fill_table(workload: Workload, shard: Tensor, first_row: int) -> None:
    """Writes the first values of rows [first_row, first_row + shard.shape[0]) into `shard`, in
    pieces."""
    with torch.no_grad():
        for start in range(0, shard.shape[0], 1 << 15):
            piece = shard[start : start + (1 << 15)]
            first = first_row + start
            rows = torch.arange(first, first + piece.shape[0], device=shard.device)
            piece.copy_(make_table_rows(workload, rows))


class Dense(nn.Module):
    """Everything after the table: token-wise MLP or HSTU, sum over each sample's tokens, one logit,
    binary cross-entropy.

    Returns the SUM of the loss over this rank's samples; whoever trains divides by the global
    count.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.encoder: nn.Module | None = None
        self.passes = workload.passes
        if workload.layers:
            from freescale.models.hstu import HSTU

            self.encoder = HSTU(
                width=workload.inner,
                layers=workload.layers,
                heads=workload.heads,
                max_length=workload.maximum_length,
                dropout=0.0,
                position_bias=False,
                time_bias=False,
                input_scale=1.0,  # tokens come out of a layer, not small out of a table
            )
            self.layers: nn.Module = nn.Linear(workload.width, workload.inner)
        else:
            self.layers = _mlp((workload.width, *workload.hidden, workload.width))
        self.head = nn.Linear(workload.inner if workload.layers else workload.width, 1)
        # The sum over a history would otherwise start the logits in the hundreds, where the loss is
        # flat.
        self.scale = workload.median_length**-0.5
        random = _stream(workload, _DENSE)
        with torch.no_grad():
            for parameter in self.parameters():
                bound = parameter.shape[-1] ** -0.5
                parameter.copy_(
                    torch.from_numpy(random.uniform(-bound, bound, tuple(parameter.shape)))
                )

    def forward(
        self, rows: Tensor, lengths: Tensor, labels: Tensor, host_lengths: Tensor
    ) -> Tensor:
        """rows [tokens, width], lengths [samples] int64, labels [samples], the lengths once more on
        the CPU, so that nobody reads them from a device -> scalar. On a GPU in bf16."""
        with torch.autocast("cuda", torch.bfloat16) if rows.is_cuda else nullcontext():
            return self._loss(rows, lengths, labels, host_lengths)

    def _loss(self, rows: Tensor, lengths: Tensor, labels: Tensor, host_lengths: Tensor) -> Tensor:
        for _ in range(self.passes - 1 if self.encoder is None else 0):
            rows = rows + self.layers(rows) / self.passes
        tokens = self.layers(rows)  # [tokens, width]
        if self.encoder is not None:
            from freescale.batch import HostSizes

            for _ in range(self.passes):
                tokens = self.encoder(tokens, lengths, host=HostSizes(host_lengths))
        logits = self.head(_pool(tokens, lengths) * self.scale).squeeze(-1)  # [samples]
        return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def _pool(tokens: Tensor, lengths: Tensor) -> Tensor:
    """tokens [tokens, width], lengths [samples] -> their sums [samples, width]."""
    if tokens.is_cuda:  # index_add would add them one by one, hundreds to the same place
        return torch.segment_reduce(tokens.float(), "sum", lengths=lengths, unsafe=True)
    # Here index_add takes a third of the time of segment_reduce, forward and backward together.
    numbers = torch.arange(lengths.shape[0])
    owner = torch.repeat_interleave(numbers, lengths, output_size=tokens.shape[0])  # [tokens]
    return tokens.new_zeros(lengths.shape[0], tokens.shape[1]).index_add(0, owner, tokens)


def _mlp(sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place, (inputs, outputs) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        layers += [nn.ReLU()] if place else []
        layers += [nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers)


def make_dense_optimizer(
    workload: Workload, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=workload.dense_learning_rate)
