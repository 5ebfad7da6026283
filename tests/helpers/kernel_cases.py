"""Cases for the Triton rows and masks, against their plain twins. As a program: through the
interpreter, as JSON.

Memory that nothing has written is poison here: NaN, or the largest integer.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from freescale.embedding.changed_rows import ALL, mark_rows
from freescale.embedding.layout import choose_stride, spread_ids
from freescale.kernels.requests import reference as division
from freescale.kernels.requests import reference as unique
from freescale.kernels.requests import triton as triton_division
from freescale.kernels.requests import triton as triton_unique
from freescale.kernels.row_moves import triton as row_copies
from freescale.kernels.row_sums import reference as rank_sums
from freescale.kernels.row_sums import reference as row_sums
from freescale.kernels.row_sums import triton as triton_rank_sums
from freescale.kernels.row_sums import triton as triton_row_sums
from freescale.kernels.row_updates import reference as row_updates
from freescale.kernels.row_updates import triton as triton_row_updates
from freescale.kernels.rows import reference as rows
from freescale.kernels.rows import triton as triton_rows
from freescale.kernels.rows.gradients import RowGradients

# ---- rows

OPTIMIZERS = {
    "sgd": ("sgd", 0, dict(lr=0.1)),
    "adagrad": ("adagrad", 1, dict(lr=0.1, eps=1e-8)),
    "rowwise_adagrad": ("rowwise_adagrad", 1, dict(lr=0.1, eps=1e-8)),
    "adam": ("adam", 2, dict(lr=0.1, betas=(0.9, 0.999), eps=1e-8, step=3)),
    "adam, quick": ("adam", 2, dict(lr=0.1, betas=(0.4, 0.9), eps=1e-8, step=1)),
}


def updated(module, name, weight, states, numbers, gradients, dtype=None):
    function, _, options = OPTIMIZERS[name]
    tensors = [x.clone() if dtype is None else x.to(dtype) for x in (weight, *states)]
    getattr(module, function)(
        *tensors, numbers, gradients if dtype is None else gradients.to(dtype), **options
    )
    return tensors


def mark_by_update(name, weight, states, numbers, gradients):
    function, _, options = OPTIMIZERS[name]
    marks = torch.zeros(len(weight), dtype=torch.uint8, device=weight.device)
    tensors = [x.clone() for x in (weight, *states)]
    getattr(triton_row_updates, function)(*tensors, numbers, gradients, **options, marks=marks)
    return marks


def setting(name, width, device, table=60, used=37, seed=0):
    torch.manual_seed(seed)
    states = [
        torch.rand(table, *([] if name == "rowwise_adagrad" else [width])).to(device)
        for _ in range(OPTIMIZERS[name][1])
    ]
    numbers, gradients = (
        torch.randperm(table)[:used].to(device),
        torch.randn(used, width).to(device),
    )
    return torch.randn(table, width).to(device), states, numbers, gradients


def optimizer(name, width, device="cpu"):
    """Relative error against the twin in float64; whether others are untouched, and whether a row
    depends on the others."""
    weight, states, numbers, gradients = setting(name, width, device)
    ours = updated(triton_row_updates, name, weight, states, numbers, gradients)
    exact = updated(row_updates, name, weight, states, numbers, gradients, torch.float64)
    error = max(
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)
    )
    marks = mark_by_update(name, weight, states, numbers, gradients)
    apart = [weight, *states]
    for part in (slice(0, 1), slice(1, 20), slice(20, None)):
        padded = torch.cat([numbers[part], numbers.new_full((3,), -1)])
        more = torch.cat([gradients[part], torch.full_like(gradients[:3], torch.nan)])
        apart = updated(triton_row_updates, name, apart[0], apart[1:], padded, more)
    others = torch.ones(len(weight), dtype=torch.bool, device=device)
    others[numbers] = False
    return {
        "error": error,
        "marks": torch.equal(marks == ALL, ~others) and not marks[others].any(),
        "others": all(
            torch.equal(a[others], b[others]) for a, b in zip(ours, (weight, *states), strict=True)
        ),
        "split": all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True)),
    }


def gathers(width, device="cpu"):
    torch.manual_seed(width)
    weight = torch.randn(50, width).to(device)
    numbers = torch.randint(0, 50, (61,), device=device)
    found = {
        "rows": torch.equal(
            triton_rows.gather_rows(weight, numbers), rows.gather_rows(weight, numbers)
        ),
        "int32": torch.equal(triton_rows.gather_rows(weight, numbers.int()), weight[numbers]),
        "float16": torch.equal(
            triton_rows.gather_rows(weight, numbers, torch.float16), weight[numbers].half()
        ),
        "none": triton_rows.gather_rows(weight, numbers[:0]).shape == (0, width),
    }
    narrow = triton_rows.gather_rows(weight, numbers, torch.bfloat16)
    if device == "cpu":  # the interpreter cuts bits off instead of rounding
        found["bfloat16"] = bool(
            ((narrow.float() - weight[numbers]).abs() <= 2**-7 * weight[numbers].abs()).all()
        )
    else:
        found["bfloat16"] = torch.equal(narrow, weight[numbers].bfloat16())
    # The sum over a row has another order.
    gradients = (
        torch.randn(9, width).to(device)
        * torch.tensor([0, 1e-20, 1e-3, 0.1, 1, 10, 1e3, 1e10, 1], device=device)[:, None]
    )
    ours, plain = (
        triton_row_updates.clip_rows(gradients.clone(), 0.7),
        row_updates.clip_rows(gradients.clone(), 0.7),
    )
    return found | {"clip": torch.allclose(ours, plain, rtol=2e-6, atol=0)}


def sums(width, device="cpu"):
    """The sum of duplicates has the twin's bits, in one call or several; behind it there is -1."""
    torch.manual_seed(1)
    numbers = torch.randint(0, 40, (400,))
    gradients = torch.randn(400, width) * torch.logspace(-6, 6, 400)[:, None]
    unique_rows, expected = rows.group_duplicates(numbers)(gradients)  # one after another
    numbers, gradients = numbers.to(device), gradients.to(device)

    def sum_duplicates(chosen):
        return triton_rows.group_duplicates(numbers[chosen])(gradients[chosen])

    (found, ours), few = sum_duplicates(slice(None)), numbers < 9
    count, count_few = len(unique_rows), int((unique_rows < 9).sum())
    _, ours_few = sum_duplicates(few)
    empty, none = sum_duplicates(slice(0))
    return {
        "equal": torch.equal(found[:count].cpu(), unique_rows)
        and torch.equal(ours[:count].cpu(), expected),
        "split": torch.equal(ours_few[:count_few], ours[:count_few]),
        "behind": len(found) == 400 and bool((found[count:] == -1).all()),
        "empty": empty.shape == (0,) and none.shape == (0, width),
    }


def reads(width, device="cpu", dtype="float32"):
    """Reading rows: values to the bit; errors of the gradients against float64; whether they depend
    on other rows."""
    torch.manual_seed(2)
    dtype, hot = getattr(torch, dtype), 3 * triton_row_sums.CHUNK + 17
    index = torch.cat(
        [
            torch.full((hot,), 5),
            torch.full((triton_row_sums.CHUNK + 1,), 2),
            torch.randint(6, 40, (100,)),
        ]
    )
    # nothing reads rows 0, 1, 3, 4 and the last
    index = index[torch.randperm(len(index))].view(-1, 2).to(device)
    table, weight = (
        torch.randn(41, width).to(device, dtype),
        torch.randn(*index.shape, width).to(device, dtype),
    )
    leaf, plain = table.clone().requires_grad_(), table.double().requires_grad_()
    out, expected = triton_rows.read_rows(leaf, index), torch.nn.functional.embedding(index, plain)
    (grad,), (exact,) = (
        torch.autograd.grad(out, leaf, weight),
        torch.autograd.grad(expected, plain, weight.double()),
    )
    alone = (index == 5).any(1) | (index == 2).any(1)
    (few,) = torch.autograd.grad(triton_rows.read_rows(leaf, index[alone]), leaf, weight[alone])
    return {
        "values": torch.equal(out, table[index]),
        "error": ((grad.double() - exact).norm() / exact.norm()).item(),
        "unread": not grad[[0, 1, 3, 4, 40]].any(),
        "split": torch.equal(few[[2, 5]], grad[[2, 5]]),
        "empty": triton_rows.read_rows(leaf, index[:0]).shape == (0, 2, width),
        "sums": sum_error(leaf, index.view(-1, 2), weight[:, 0]),
        "no sums": triton_rows.sum_rows(leaf, index[:0]).shape == (0, width),
    }


def sum_error(leaf, index, weight):
    """Sums over places, some of them -1: the largest relative error of values and gradients."""
    index = torch.where(index % 7 == 0, -1, index)
    exact = leaf.detach().double().requires_grad_()
    found = triton_rows.sum_rows(leaf, index)
    expected = (exact[index] * (index >= 0)[..., None]).sum(1)
    (grad,) = torch.autograd.grad(found, leaf, weight)
    (right,) = torch.autograd.grad(expected, exact, weight.double())
    pairs = ((found, expected), (grad, right))
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def row_values(width, device):
    """Rows with one value, with some, with as many as a chunk holds and one more or less, and with
    many chunks; values so different that another order of addition gives other bits."""
    torch.manual_seed(5)
    chunk = triton_row_sums.CHUNK
    lengths = [1, 2, chunk, chunk - 1, chunk + 1, 3, 5 * chunk + 17, 2 * chunk, 7, 1]
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) * 3
    index = index[torch.randperm(len(index))]
    values = torch.randn(len(index), width) * torch.logspace(-4, 4, len(index))[:, None]
    return index.to(device, torch.int32), values.to(device)


def add_chunks(values, rows):
    """[width]: the sum of a long row, in the order that the kernels promise: `rows` values side by
    side, then half to half, then chunk after chunk."""
    total = None
    for chunk in values.split(triton_row_sums.CHUNK):
        padded = torch.nn.functional.pad(chunk, (0, 0, 0, -len(chunk) % rows))
        side, *others = padded.view(-1, rows, values.shape[1])
        for other in others:
            side = side + other
        while len(side) > 1:
            side = side[: len(side) // 2] + side[len(side) // 2 :]
        total = side[0] if total is None else total + side[0]
    return total


def row_sums_of(width, device="cpu"):
    """Sums by row: short rows have the twin's bits, long ones are within its error and do not
    depend on other rows; both forms have the same bits."""
    index, values = row_values(width, device)
    chunk = triton_row_sums.CHUNK
    count = int(index.max()) + 2  # the last, and two of three, have no values
    ours = triton_row_sums.sum_by_row(values, index, count)
    plain = row_sums.sum_by_row(values.cpu(), index.cpu(), count)
    exact = row_sums.sum_by_row(values.double(), index, count)
    lengths = torch.bincount(index.cpu(), minlength=count)
    short = (lengths <= triton_row_sums.CHUNK).to(device)
    found, sums = triton_row_sums.sum_sorted(row_sums.SortedRows.of(index), values)
    begins = found >= 0
    hot = (index == 18) | (index == 12)
    alone = triton_row_sums.sum_by_row(values[hot], index[hot], count)
    few = values[:chunk].cpu(), index[:chunk].cpu()
    cut = triton_row_sums.sum_by_row(values[:chunk], index[:chunk], count)
    marked = torch.where(index == 18, -1, index)
    skipped = triton_row_sums.sum_by_row(values, marked, count)
    skipped[18] = ours[18]
    narrow = values.bfloat16()
    sums_of_narrow = triton_row_sums.sum_by_row(narrow, index, count, dtype=torch.float32)
    rows = min(triton_row_sums.CHUNKS.shape(width)["R"], chunk)
    in_order = [add_chunks(values[index == row], rows) for row in (18, 21)]
    there = torch.randn_like(ours)
    onto = triton_row_sums.sum_by_row(values, index, count, onto=there.clone())
    size = exact.abs().max()
    return {
        "short": torch.equal(ours[short].cpu(), plain[short.cpu()]),
        "error": ((ours - exact).abs().max() / size).item(),
        "order": torch.equal(ours[[18, 21]], torch.stack(in_order)),
        "unread": not ours[(lengths == 0).to(device)].any(),
        "positions": torch.equal(found[begins].long().cpu(), lengths.nonzero().squeeze(1))
        and torch.equal(sums[begins], ours[found[begins].long()]),
        "split": torch.equal(alone[[12, 18]], ours[[12, 18]]),
        "no row": torch.equal(skipped, ours),
        "few": torch.equal(cut.cpu(), row_sums.sum_by_row(*few, count)),
        "onto": torch.equal(onto, ours + there),
        "narrow": torch.equal(
            sums_of_narrow, triton_row_sums.sum_by_row(narrow.float(), index, count)
        ),
        "empty": not triton_row_sums.sum_by_row(values[:0], index[:0], 3).any(),
    }


def summed_update(name, width, device="cpu"):
    """An update by sorted rows has the bits of the sums and an update by them."""
    index, values = row_values(width, device)
    weight, states, _, _ = setting(name, width, device)
    ordered = row_sums.SortedRows.of(index)
    ours = updated(triton_row_updates, name, weight, states, ordered, values)
    apart = updated(
        triton_row_updates, name, weight, states, *triton_row_sums.sum_sorted(ordered, values)
    )
    few = row_sums.SortedRows.of(index[:40])
    first = updated(triton_row_updates, name, weight, states, few, values[:40])
    second = updated(
        triton_row_updates, name, weight, states, *triton_row_sums.sum_sorted(few, values[:40])
    )
    narrow = values.bfloat16()
    by_narrow, by_wide = (
        updated(triton_row_updates, name, weight, states, ordered, each)
        for each in (narrow, narrow.float())
    )
    marks = mark_by_update(name, weight, states, ordered, values)
    read = torch.zeros_like(marks)
    mark_rows(read, index[index >= 0].long())
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True)),
        "marks": torch.equal(marks, read),
        "few": all(torch.equal(a, b) for a, b in zip(first, second, strict=True)),
        "narrow": all(torch.equal(a, b) for a, b in zip(by_narrow, by_wide, strict=True)),
        "changed": not torch.equal(ours[0], weight),
    }


def left_gradients(width, device="cpu"):
    """What readings leave to `RowGradients`: every part in its place, whichever came first."""
    torch.manual_seed(6)
    table = torch.randn(30, width).to(device)
    parts = [torch.randint(0, 30, (n,), device=device, dtype=torch.int32) for n in (40, 0, 7, 5)]
    kept = RowGradients(parts, table)
    weights = [torch.randn(len(part), width).to(device) for part in parts]
    other = torch.tensor([[3, 4]], device=device)
    values = [
        triton_rows.read_rows(table, index, kept, part)
        for part, index in ((2, parts[2].view(1, -1)), (0, parts[0]), (0, parts[0]), (None, other))
    ]
    loss = (values[0] * weights[2]).sum() + (values[3] * 2).sum()
    loss = loss + ((values[1] + values[2]) * weights[0]).sum()
    loss.backward()
    (rows_of, taken), (read_rows_of, read) = kept.take(), kept.take(only_read=True)
    zeros, two = torch.zeros_like(weights[3]), torch.full((2, width), 2.0, device=device)
    return {
        "values": torch.equal(values[1], table[parts[0].long()]),
        "gradients": torch.equal(
            taken, torch.cat([weights[0] * 2, weights[1], weights[2], zeros, two])
        ),
        "rows": torch.equal(rows_of.long(), torch.cat([*parts, other.view(-1)]).long()),
        "read": torch.equal(read, torch.cat([weights[0] * 2, weights[2], two]))
        and len(read_rows_of) == 40 + 7 + 2,
        "anchor": kept.anchor.grad is None,
    }


def left_narrow_gradients(width, device="cpu"):
    """Reads in 16 bits leave their gradients as they are, several of a part one by one: sums are in
    the dtype of the rows."""
    torch.manual_seed(7)
    table = torch.randn(30, width).to(device)
    parts = [torch.randint(0, 30, (n,), device=device, dtype=torch.int32) for n in (9, 4, 6)]
    kept, narrow = RowGradients(parts, table), torch.float16  # the interpreter truncates bfloat16
    reads = [triton_rows.read_rows(table, parts[part], kept, part, narrow) for part in (0, 2, 2)]
    weights = [torch.randn(len(read), width).to(device, narrow) for read in reads]
    sum((read * weight).sum() for read, weight in zip(reads, weights, strict=True)).backward()
    rows, taken = kept.take()
    sums = triton_row_sums.sum_by_row(taken, rows, 30, dtype=kept.dtype)
    expected = torch.zeros(30, width, dtype=torch.float64, device=device)
    for part, weight in zip((0, 2, 2), weights, strict=True):
        expected.index_add_(0, parts[part].long(), weight.double())
    leaf = table.clone().requires_grad_()
    read = triton_rows.read_rows(leaf, parts[0], dtype=narrow)
    (alone,) = torch.autograd.grad(read, leaf, weights[0])
    few = torch.zeros_like(expected).index_add_(0, parts[0].long(), weights[0].double())
    return {
        "values": torch.equal(reads[0], table[parts[0].long()].to(narrow)),
        "left": taken.dtype == narrow and len(taken) == 9 + 4 + 6 + 6,
        "sums": sums.dtype == table.dtype and torch.allclose(sums.double(), expected, atol=1e-6),
        "alone": alone.dtype == leaf.dtype and torch.allclose(alone.double(), few, atol=1e-6),
        "read": torch.equal(read.detach(), reads[0].detach()),
    }


def spreads(device="cpu"):
    """Where ids are in storage, as the plain arithmetic has it; products beyond 32 bits."""
    found = {}
    for rows_of, base in ((1, 0), (7, 3), (2_000_003, 1000), (3_000_000_019, 5)):
        ids = torch.randint(0, rows_of, (50,), device=device)
        ids[0] = rows_of - 1
        out = torch.empty(50, dtype=torch.int32 if rows_of < 2**31 else torch.int64, device=device)
        triton_row_sums.spread_ids(ids, out, choose_stride(rows_of), rows_of, base)
        found[str(rows_of)] = torch.equal(out.long(), spread_ids(ids, rows_of) + base)
    return found


# ---- unique keys and masks

KEYS = {
    "random": (3000, 400),
    "one key": (2000, 1),
    "far apart": (500, 1 << 60),
    "few": (3, 5),
    "one": (1, 9),
    "none": (0, 5),
}


def deduplicated(name, device="cpu", lowest=0):
    """`lowest`: of the keys; those of dynamic tables have signs."""
    torch.manual_seed(3)
    n, top = KEYS[name]
    keys = torch.randint(lowest, top, (n,), device=device)
    edges = torch.tensor([lowest // 2, top // 3, top // 3, top], device=device)
    plain, ours = unique.deduplicate(keys, edges), triton_unique.deduplicate(keys, edges)
    count = int(plain.counts.sum())
    starts, order = ours.starts.cpu().numpy(), ours.order.cpu().numpy()
    members = [order[a:b] for a, b in zip(starts[:count], starts[1:])]
    return {
        "inverse": torch.equal(plain.inverse, ours.inverse),
        "counts": torch.equal(plain.counts, ours.counts),
        "keys": torch.equal(ours.keys[:count], plain.keys)
        and bool((ours.keys[count:] == -1).all()),
        "order": all(
            np.array_equal(np.flatnonzero(plain.inverse.cpu() == key), found)
            for key, found in enumerate(members)
        ),
        "starts": bool((starts[count:] == n).all()),
    }


def masks(name, device="cpu"):
    torch.manual_seed(4)
    n, top = KEYS[name]
    current, following = (
        torch.randint(0, top, (n,), device=device),
        torch.randint(top // 2, 2 * top, (n // 2 + 1,), device=device),
    )
    pairs = zip(
        unique.collision_masks(current, following),
        triton_unique.collision_masks(current, following),
        strict=True,
    )
    return {
        "collisions": all(torch.equal(a, b) for a, b in pairs),
        "empty": not triton_unique.find_members(current, following[:0]).any(),
    }


def tags(device="cpu"):
    """Rows of several lists, of one and of many ranks, some without any."""
    random, found = np.random.default_rng(5), {}
    for ranks in (1, 2, 5, 300):
        lists = []
        for pieces in (1, 8, 64, 2):
            sizes = random.integers(0, 9, ranks) * random.integers(0, 2, ranks)
            count = int(sizes.sum()) if pieces != 64 else 0
            rows = torch.from_numpy(random.integers(-(1 << 62), 1 << 62, count)).to(device)
            marked = torch.from_numpy(random.random(count) < 0.3).to(device)
            of_ranks = sizes.tolist() if count else [0] * ranks
            lists.append(division.MarkedRows(marked, rows, of_ranks, pieces))
        plain, ours = division.tag_rows(lists), triton_division.tag_rows(lists)
        found[f"{ranks} ranks"] = torch.equal(plain, ours) and plain.dtype == ours.dtype
    return found


def sums_of_ranks(device="cpu"):
    """Numbers whose sum depends on the order, more and fewer than a program adds."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        for ranks, count, times in ((1, 7, 1), (3, 0, 3), (4, 1023, 4), (8, 2049, 8), (5, 3000, 2)):
            torch.manual_seed(ranks)
            scale = 10.0 ** torch.randint(-6, 7, (ranks, count))
            parts = (torch.randn(ranks, count) * scale).to(device, dtype)
            plain, ours = (of.sum_in_order(parts, times) for of in (rank_sums, triton_rank_sums))
            found[f"{ranks} ranks, {dtype}"] = torch.equal(plain, ours)
    return found


def copies(width, device):
    """Rows copied between a table on the device and one on the host, both ways: more than the
    programs copy at a time, one, and none. Bits that are no number keep their payload."""
    torch.manual_seed(0)
    programs, row_copies.PROGRAMS = row_copies.PROGRAMS, 3
    own = torch.randn(900, width, device=device)
    host = torch.randn(900, width, pin_memory=device == "cuda")
    for table in (own, host):
        table[::7] = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    found = {}
    for count in (0, 1, 700):
        for to, source in ((own, host), (host, own)):
            to_rows, numbers = (torch.randperm(900, device=device)[:count] for _ in range(2))
            expected = to.clone()
            expected[to_rows.to(to.device)] = source[numbers.to(source.device)].to(to.device)
            row_copies.copy_rows(to, to_rows, source, numbers)
            if device == "cuda":
                torch.cuda.synchronize()
            same = torch.equal(to.view(torch.int32), expected.view(torch.int32))
            found[f"{count} rows, {to.device} from {source.device}"] = same
    row_copies.PROGRAMS = programs
    return found


WIDTHS = (1, 12, 128)
ROWS = {
    **{
        f"{name} {width}": lambda device, n=name, w=width: optimizer(n, w, device)
        for name in OPTIMIZERS
        for width in WIDTHS
    },
    **{f"gather {width}": lambda device, w=width: gathers(w, device) for width in (*WIDTHS, 100)},
    **{f"sums {width}": lambda device, w=width: sums(w, device) for width in WIDTHS},
    **{f"reads {width}": lambda device, w=width: reads(w, device) for width in WIDTHS},
    **{
        f"row sums {width}": lambda device, w=width: row_sums_of(w, device)
        for width in (*WIDTHS, 300)  # above 256 by another kernel
    },
    **{
        f"summed {name} {width}": lambda device, n=name, w=width: summed_update(n, w, device)
        for name in OPTIMIZERS
        for width in ((12, 128) if name == "adam" else (12,))
        if name != "rowwise_adagrad"
    },
    **{f"copies {width}": lambda device, w=width: copies(w, device) for width in WIDTHS},
    "left gradients": lambda device: left_gradients(12, device),
    "left gradients, 16 bits": lambda device: left_narrow_gradients(12, device),
    "spread ids": spreads,
    **{f"unique, {name}": lambda device, n=name: deduplicated(n, device) for name in KEYS},
    "unique, signed": lambda device: deduplicated("far apart", device, -(1 << 60)),
    **{f"masks, {name}": lambda device, n=name: masks(n, device) for name in KEYS},
    "tags": tags,
    "sums of ranks": sums_of_ranks,
}


def holds(found, limit=2e-6):
    """Everything true, and every error below the limit; NaN is not."""
    return bool(found) and all(
        value < limit if isinstance(value, float) else value is True for value in found.values()
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    triton_row_sums.CHUNK = 8  # long rows, and few values: the interpreter is slow
    print(json.dumps({name: case("cpu") for name, case in {"rows": ROWS}[sys.argv[1]].items()}))
