"""The kernels on one GPU: jagged moves, table rows, deduplication, attention and a whole HSTU layer, against plain torch.

    python3 benchmarks/bench_kernels.py --commit HASH
    python3 benchmarks/bench_kernels.py --device cpu      # tiny, through Triton's interpreter, to try the script; writes nothing

Times are medians by device events, with the launches queued up behind a pause as in a training step; `call` is what a call takes
the host. Rates count each byte that must be read or written once, and operations of the lower triangle; ceilings (a copy, a
matrix product) are measured here. Small inputs rotate, so that the cache does not hold them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from kernel_times import SIZES, Bench, Call, in_turn  # noqa: E402
from results import write  # noqa: E402

from freescale.kernels import attention, jagged, rows, triton_attention, triton_jagged, triton_rows, triton_unique  # noqa: E402
from freescale.models.hstu import HSTULayer  # noqa: E402

WIDTH, HEADS = 128, 4


def moves(bench: Bench) -> None:
    lengths = bench.lengths(bench.size["samples"])[None]
    tokens, samples = int(lengths.sum()), lengths.shape[1]
    generator = np.random.default_rng(1)
    order = generator.permutation(samples)
    sets = 16 if bench.device.type == "cuda" else 1
    slowest = {"dispatch": 0.0, "combine": 0.0}
    ids = [torch.randint(0, 1 << 40, (tokens,), device=bench.device) for _ in range(sets)]
    for world in bench.size["worlds"]:
        counts = np.bincount(generator.integers(0, world, samples), minlength=world)
        plans = {
            "dispatch": jagged.plan_dispatch(lengths, order, counts),
            "combine": jagged.plan_combine(lengths[:, order], counts),
        }
        for kind, plan in plans.items():
            ours = in_turn([lambda x=x, p=plan: triton_jagged.move([x], p) for x in ids])
            plain = in_turn([lambda x=x, p=plan: jagged.move([x], p) for x in ids])
            row = bench.measure("moves", f"{kind} of ids, W = {world}", ours, plain, gigabytes=2 * ids[0].nbytes / 1e9)
            slowest[kind] = max(slowest[kind], row["ms"]["median"])
    for kind, slow in slowest.items():
        text = f"{kind} of ids, {samples} samples a rank, every W of {list(bench.size['worlds'])}: the slowest"
        bench.claim(text, 0.1, slow, "ms", at_least=False)
    started = time.perf_counter()
    jagged.plan_dispatch(lengths, order, counts)
    bench.rows.append(
        {"group": "moves", "case": "plan of a dispatch, host", "ms": {"median": 1e3 * (time.perf_counter() - started)}}
    )
    del ids
    worst = 100.0
    for share in (1.0, 0.45):  # 148 and 66 MB of payload
        some = np.maximum(1, (lengths * share).astype(np.int64))
        plans = {
            "dispatch": jagged.plan_dispatch(some, order, counts, [(WIDTH,)]),
            "combine": jagged.plan_combine(some[:, order], counts, [(WIDTH,)]),
            "permute": jagged.plan_permute(some, order, [(WIDTH,)]),
        }
        for kind, plan in plans.items():
            value = bench.draw(plan.source.rows[0], *plan.source.shapes[0], dtype=torch.bfloat16)
            size = value.nbytes / 1e9
            for name, way in (("", plan), (" backward", plan.inverse)):
                given = value if not name else triton_jagged.move([value], plan)[0]
                ours, plain = (lambda m=m, g=given, w=way: m.move([g], w) for m in (triton_jagged, jagged))
                label = f"{kind}{name} of {1e3 * size:.0f} MB of bf16 rows"
                row = bench.measure("moves", label, ours, plain, gigabytes=2 * size)
                worst = min(worst, row["ceiling_percent"])
    bench.claim("moves of 128-wide bf16 payloads of 64 MB and more, of copy bandwidth: the worst", 70, worst, "%")
    two = np.stack([lengths[0], bench.lengths(samples, 2)])
    plan = jagged.plan_transpose(two)
    values = [torch.randint(0, 1 << 40, (n,), device=bench.device) for n in plan.source.rows]
    ours, plain = (lambda m=m: m.move(values, plan) for m in (triton_jagged, jagged))
    bench.measure("moves", "transpose of two features of ids", ours, plain, gigabytes=2 * sum(v.nbytes for v in values) / 1e9)


def table_rows(bench: Bench) -> None:
    count, used = bench.size["table"], bench.size["rows"]
    weight, first, second = (bench.draw(count, WIDTH).abs_() for _ in range(3))
    total = bench.draw(count).abs_()
    numbers = torch.randperm(count, device=bench.device)[:used]
    gradients = bench.draw(used, WIDTH)
    row = used * WIDTH * 4 / 1e9
    calls: dict[str, tuple[float, Callable[[Any], Any]]] = {
        "gather": (2 * row, lambda m: m.gather_rows(weight, numbers)),
        "sgd": (3 * row, lambda m: m.sgd(weight, numbers, gradients, lr=0.01)),
        "adagrad": (5 * row, lambda m: m.adagrad(weight, first, numbers, gradients, lr=0.01, eps=1e-8)),
        "rowwise_adagrad": (3 * row, lambda m: m.rowwise_adagrad(weight, total, numbers, gradients, lr=0.01, eps=1e-8)),
        "adam": (
            7 * row,
            lambda m: m.adam(weight, first, second, numbers, gradients, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, step=9),
        ),
    }
    for name, (size, call) in calls.items():
        ours, plain = (lambda m=m, c=call: c(m) for m in (triton_rows, rows))
        found = bench.measure("rows", f"{name}, {used:,} of {count:,} x {WIDTH}", ours, plain, gigabytes=size)
        bench.claim(f"{name} of {used:,} random rows of {WIDTH} floats, of copy bandwidth", 70, found["ceiling_percent"], "%")
    narrow = lambda: triton_rows.gather_rows(weight, numbers, torch.bfloat16)  # noqa: E731
    bench.measure("rows", "gather to bf16", narrow, lambda: weight[numbers].bfloat16(), gigabytes=1.5 * row)
    # Tokens of a rank read its rows: Zipf, so that some are read very often.
    tokens = int(bench.lengths(bench.size["samples"]).sum())
    drawn = np.random.default_rng(0).zipf(1.2, tokens) % min(count, 10**9)
    keys = torch.from_numpy(drawn).to(bench.device)
    unique, index = torch.unique(keys, return_inverse=True)
    fetched = bench.draw(len(unique), WIDTH).requires_grad_()
    grad = bench.draw(tokens, WIDTH)
    size, small = tokens * WIDTH * 4 / 1e9, len(unique) * WIDTH * 4 / 1e9
    plain_read = lambda: torch.nn.functional.embedding(index, fetched)  # noqa: E731
    label = f"{tokens:,} tokens of {len(unique):,} rows"
    bench.measure("rows", f"read, {label}", lambda: triton_rows.read_rows(fetched, index), plain_read, gigabytes=size + small)
    ours, plain = triton_rows.read_rows(fetched, index), plain_read()
    back = [lambda o=o: torch.autograd.grad(o, fetched, grad, retain_graph=True) for o in (ours, plain)]
    bench.measure("rows", f"read backward, {label}", *back, gigabytes=size + small)
    asked = torch.randint(0, count, (used // 4,), device=bench.device)
    part = gradients[: used // 4]
    duplicates = [lambda m=m: m.sum_duplicates(asked, part) for m in (triton_rows, rows)]
    bench.measure("rows", f"sum of duplicates, {used // 4:,}", *duplicates, gigabytes=row / 2)
    edges = torch.arange(1, 65, device=bench.device) * (count // 64 + 1)
    plain_unique = lambda: torch.unique(keys, return_inverse=True)  # noqa: E731
    bench.measure("unique", f"deduplicate {tokens:,} keys", lambda: triton_unique.deduplicate(keys, edges), plain_unique)
    from freescale.embedding.collision import collision_masks

    masks = [lambda f=f: f(asked, unique) for f in (triton_unique.collision_masks, collision_masks)]
    bench.measure("unique", f"masks of {len(asked):,} and {len(unique):,} rows", *masks)


def attended(bench: Bench, name: str, lengths: np.ndarray, width: int) -> tuple[float, float]:
    """TFLOP/s of forward and backward."""
    narrow = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    q, k, v = (bench.draw(int(lengths.sum()), HEADS, width, dtype=narrow).requires_grad_() for _ in range(3))
    weight = bench.draw(int(lengths.sum()), HEADS, width, dtype=narrow)
    there = torch.from_numpy(lengths).to(bench.device)
    plan = triton_attention.plan_attention(there, HEADS)
    shared = {"scale_length": bench.size["cap"], "alpha": width**-0.5, "plan": plan}
    work = 4 * HEADS * width * float((lengths.astype(float) ** 2).sum()) / 2 / 1e12
    label = f"{name}, {len(lengths)} samples, {HEADS} heads of {width}"
    out = triton_attention.hstu_attention(q, k, v, there, **shared)
    with torch.no_grad():
        ours: Call = lambda: triton_attention.hstu_attention(q, k, v, there, **shared)  # noqa: E731
        forward = bench.measure("attention", f"forward, {label}", ours, teraflops=work)
    grads: Call = lambda: torch.autograd.grad(out, (q, k, v), weight, retain_graph=True)  # noqa: E731
    backward = bench.measure("attention", f"backward, {label}", grads, teraflops=2.5 * work)
    return forward["rate"], backward["rate"]


def attentions(bench: Bench) -> None:
    batches = {"full": np.array(bench.size["long"]), "log-normal": bench.lengths(bench.size["samples"])}
    for width, asked in ((128, (420, 260)), (64, (300, 200))):
        rates = {name: attended(bench, name, lengths, width) for name, lengths in batches.items()}
        for way, least, full, jagged_ in zip(("forward", "backward"), asked, rates["full"], rates["log-normal"]):
            bench.claim(f"attention {way}, 4 x 16,384 tokens, {HEADS} heads of {width}", least, full, "TFLOP/s")
            text = f"attention {way}, {HEADS} heads of {width}, log-normal lengths, of the full-length rate"
            bench.claim(text, 85, 100 * jagged_ / full, "%")


def layer(bench: Bench) -> None:
    """A whole layer, forward and backward, in bf16; the plain attention holds its score tiles, ours none."""
    on_gpu = bench.device.type == "cuda"
    width, heads = (512, HEADS) if on_gpu else (64, 2)
    one = HSTULayer(
        number=0, width=width, heads=heads, d_qk=width // heads, d_v=width // heads, max_length=bench.size["cap"], dropout=0.0,
        position_bias=False, time_bias=False, num_time_buckets=128,
    ).to(bench.device)  # fmt: skip

    def call(lengths: np.ndarray, kernel: Any) -> tuple[Call, int]:
        there = torch.from_numpy(lengths).to(bench.device)
        plan = kernel.plan_attention(there, heads)
        x = bench.draw(int(lengths.sum()), width).requires_grad_()

        def step() -> None:
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=on_gpu):
                out = one(x, there, None, None, None, plan)
            out.float().square().sum().backward()
            x.grad = None
            one.zero_grad()

        return step, x.shape[0]

    lengths = bench.lengths(bench.size["layer"])
    ours, tokens = call(lengths, triton_attention)
    plain, _ = call(lengths, attention)
    row = bench.measure("layer", f"HSTU layer forward + backward, {tokens:,} tokens", ours, plain)
    bench.claim("HSTU layer forward + backward, log-normal lengths up to 21,000, faster than eager", 5, row["faster"], "times")
    if on_gpu:
        peaks = {}
        for length in (bench.size["cap"] // 4, bench.size["cap"]):
            step, tokens = call(np.full(bench.size["line"], length), triton_attention)
            step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            peaks[length] = (torch.cuda.max_memory_allocated() - before) / tokens
        bench.rows.append({"group": "layer", "case": "peak bytes per token, by length", "bytes": peaks})
        growth = peaks[bench.size["cap"]] / peaks[bench.size["cap"] // 4]
        bench.claim("peak memory of a layer per token, at 21,000 of that at 5,250", 1.05, growth, "times", at_least=False)


PARTS: dict[str, Callable[[Bench], None]] = {"moves": moves, "rows": table_rows, "attention": attentions, "layer": layer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--only", choices=PARTS, nargs="*", help="some parts; nothing is written then")
    parser.add_argument("--commit", help="of the tree that is measured, where it was copied without its history")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which happens at the first launch
    torch.manual_seed(0)
    bench = Bench(options.device)
    for name in options.only or PARTS:
        started = time.perf_counter()
        PARTS[name](bench)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    if options.device == "cpu" or options.only:
        print(f"{len(bench.rows)} rows and {len(bench.claims)} claims, not written")
        return
    copied = {"commit": options.commit} if options.commit else {}
    ceilings = {"copy_tb_per_s": bench.bandwidth, "bf16_matrix_tflop_per_s": bench.flops}
    command = "python3 benchmarks/bench_kernels.py"
    write("kernels", "h200", command, bench.rows, bench.claims, ["triton"], ceilings=ceilings, **copied)


if __name__ == "__main__":
    main()
