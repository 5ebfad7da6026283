"""The workload that all arms of a benchmark share: batches, initial table values, and dense layers.

Imports only torch and numpy (and, for a model with attention, FreeScale's HSTU), to run in the
peer's environment too. Everything is a function of the workload, the rank and the number of ranks:
arms with the same workload get the same ids and the same initial weights, and compute the same
update:

    loss = sum over the samples of all ranks / number of samples of all ranks

with dense gradients summed over ranks and row gradients summed per row.
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

# the purpose of a random stream, part of its key
_BATCH, _PERMUTATION, _DENSE = 1, 2, 3


@dataclass(frozen=True)
class Workload:
    """One table, log-normal history lengths, a token-wise MLP. Sizes are per rank unless noted."""

    rows: int = 1_000_000  # of the whole table
    width: int = 128
    samples: int = 64
    median_length: float = 200.0
    sigma: float = 1.0  # of the log of the lengths
    maximum_length: int = 2000
    # Zipf's exponent; or distinct ids within a rank's batch, drawn uniformly or uniformly in log
    # rank, which is close to an exponent of 1 and needs no table of all ids
    popularity: float | Literal["unique", "unique log"] = "unique"
    # instead of a popularity: ids distinct in a global batch, of which this share was also in the
    # previous batch
    collisions: float | None = None
    hidden: tuple[int, ...] = (256,)  # the MLP is width - hidden... - width
    # applications of the MLP, all with the same weights; all but the last are residual
    passes: int = 1
    layers: int = 0  # of HSTU, instead of the MLP; rows are projected to its width first
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
                f"{self.rows} rows are too few for {self.samples} x {self.maximum_length} distinct "
                "ids; set more rows"
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
    """Returns this rank's batches: (ids int64 [tokens], lengths int64 [samples], labels float32
    [samples]) for each step."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of {world} ranks")
    cumulative = permutation = None
    if not isinstance(workload.popularity, str):
        weights = np.arange(1, workload.rows + 1, dtype=np.float64) ** -float(workload.popularity)
        cumulative = np.cumsum(weights) / weights.sum()
        # Popular rows are scattered over the table, to balance row-wise shards.
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
    """Draws `count` distinct rows, uniform in the log of their popularity rank. Row number (r - 1)
    * step mod rows has rank r, to scatter popular rows."""
    step = next(step for step in (7919, 7907, 1) if np.gcd(step, rows) == 1)
    drawn: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    while True:
        more = np.exp(random.random(3 * count) * np.log(rows + 1.0)).astype(np.int64) - 1
        drawn = np.concatenate([drawn, np.minimum(more, rows - 1)])
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if first.size >= count:
            return drawn[first[:count]] * step % rows


def draw_lengths(
    random: np.random.Generator, median: float, count: int, cap: int, sigma: float = 1.0
) -> npt.NDArray[np.int64]:
    """Draws log-normal lengths [count], from 1 to `cap`."""
    drawn = np.exp(random.normal(np.log(median), sigma, count))
    return np.clip(np.rint(drawn), 1, cap).astype(np.int64)


def _lengths(workload: Workload, random: np.random.Generator) -> npt.NDArray[np.int64]:
    median, cap = workload.median_length, workload.maximum_length
    return draw_lengths(random, median, workload.samples, cap, workload.sigma)


def _colliding(workload: Workload, step: int, rank: int, world: int) -> np.ndarray:
    """Returns this rank's ids of a step whose global batch shares `workload.collisions` of its rows
    with the previous and the next batch.

    Rows are arranged on a circle. A global batch is an arc, and the next arc starts before its end,
    by that share. The first step therefore follows the last like any other, and up to a share of
    1/2 only neighbours overlap. Rows of an arc are assigned to ranks at random in every step.
    """
    assert workload.collisions is not None
    keys = [(number, other) for number in range(workload.steps) for other in range(world)]
    tokens = np.array(
        [_lengths(workload, _stream(workload, _BATCH, *key)).sum() for key in keys]
    ).reshape(workload.steps, world)
    arcs = tokens.sum(1)
    # between the starts of consecutive arcs
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
    """Initial values of the given rows, [n] int64 -> [n, width] float32 in [-0.1, 0.1): a function
    of row and column."""
    columns = torch.arange(workload.width, device=rows.device)
    bits = (
        rows[:, None] * workload.width + columns + workload.seed * 1_000_003
    ) * 6364136223846793005
    bits = (bits ^ (bits >> 29)) * 1442695040888963407
    # A float32 holds 24 bits exactly, so no conversion rounds.
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32).mul_(0.2 / 2**24).sub_(0.1)


def fill_table(workload: Workload, shard: Tensor, first_row: int) -> None:
    """Writes the initial values of rows [first_row, first_row + shard.shape[0]) into `shard`, in
    chunks."""
    with torch.no_grad():
        for start in range(0, shard.shape[0], 1 << 15):
            piece = shard[start : start + (1 << 15)]
            first = first_row + start
            rows = torch.arange(first, first + piece.shape[0], device=shard.device)
            piece.copy_(make_table_rows(workload, rows))


class Dense(nn.Module):
    """Everything after the table: token-wise MLP or HSTU, sum over each sample's tokens, one logit,
    binary cross-entropy.

    Returns the SUM of the loss over this rank's samples. The training loop divides by the global
    number of samples.
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
                input_scale=1.0,  # tokens are a layer's outputs, not small table rows
            )
            self.layers: nn.Module = nn.Linear(workload.width, workload.inner)
        else:
            self.layers = _mlp((workload.width, *workload.hidden, workload.width))
        self.head = nn.Linear(workload.inner if workload.layers else workload.width, 1)
        # Without it the sum over a history would start logits in the hundreds, where the loss is
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
        """rows [tokens, width], lengths [samples] int64, labels [samples], host_lengths: the
        lengths on the CPU (avoids a device read) -> scalar. On a GPU in bf16."""
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
    if tokens.is_cuda:  # index_add would serialize hundreds of additions per sample
        return torch.segment_reduce(tokens.float(), "sum", lengths=lengths, unsafe=True)
    # On a CPU index_add takes a third of the time of segment_reduce, forward plus backward.
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
