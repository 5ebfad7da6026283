"""A history that does not fit on one rank, whose process may allocate a share of the GPU only."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

from freescale_bench.common.ranks import gather_json, open_rank
from freescale_bench.common.results import Destination, Row, at_least, write
from freescale_bench.split.setting import (
    SETTINGS,
    SPLIT,
    WHOLE,
    Setting,
    Shape,
    build_pipeline,
    make_batch,
    shrink,
)

SHAPE = Shape(256, 4, 4, (131_072,))
STEPS = 3
ROOM = 1.1  # limit, in what the divided history reserves
# Memory that is reserved but not in use would decide otherwise whether a history fits.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def choose_shape(setting: Setting) -> Shape:
    return shrink(SHAPE, 100) if setting.trial else SHAPE


def bench(setting: Setting, to: Destination) -> None:
    """The divided history in less and less memory, while it takes less by itself (tables of biases
    take a share of the limit at most); then the whole one in as little."""
    os.environ.update(ALLOCATOR)
    rows: list[Row] = []

    def run(arm: str, limit: int) -> int | None:
        """Bytes that a rank has reserved at most; None: it did not fit."""
        found = setting.run_ranks("memory", f"{arm}:{limit}", setting.ranks, may_fail=limit > 0)
        unknown = {"arm": arm, "trained": False, "error": "no rank says why"}
        rows.append((found or unknown) | {"limit_bytes": limit or None})
        return max(rows[-1]["reserved_bytes_per_rank"]) if rows[-1]["trained"] else None

    limit, reserved = 0, run(SPLIT, 0)
    while reserved and (not limit or ROOM * reserved < 0.9 * limit):
        limit = int(ROOM * reserved)
        reserved = run(SPLIT, limit)
    run(WHOLE, limit)
    for row in rows:
        print(row, flush=True)
    trained = {row["arm"]: int(row["trained"]) for row in rows}
    lacking = int("out of memory" in rows[-1].get("error", ""))
    text = f"one history of {choose_shape(setting).lengths[0]:,} events in {limit / 1e9:.1f} GB"
    text += " of a rank: "
    claims = [
        at_least(text + f"trains, divided over {setting.ranks} ranks", 1, trained[SPLIT], ""),
        at_least(text + "does not fit as a whole", 1, lacking, ""),
    ]
    if not setting.trial:
        name = f"split-memory-{setting.ranks}ranks"
        shape = choose_shape(setting).describe()
        command = f"{setting.name_command('memory')} --nproc {setting.ranks}"
        write(name, setting.testbed, command, rows, claims, to=to, shape=shape)


def measure(setting: Setting, words: str, output: Path) -> None:
    """As one of the ranks, with a limit in bytes; 0: none. Rank 0 writes the row."""
    arm, limit = words.split(":")
    cuda = setting.device == "cuda"
    if cuda and int(limit):
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(int(limit) / whole, 0)
    shape, begin = choose_shape(setting), time.perf_counter()
    with open_rank(setting.device, setting.limit) as (transport, _):
        precision = "bf16" if cuda else "fp32"
        pipeline = build_pipeline(shape, transport, SETTINGS[arm], precision=precision)
        batches = [make_batch(shape, transport.rank, transport.world, n) for n in range(STEPS)]
        try:
            losses = []
            for result in pipeline.run(batches):
                losses.append(float(result.loss))
                if transport.rank == 0:
                    print(f"  step {result.step}: {time.perf_counter() - begin:.0f} s", flush=True)
        except torch.OutOfMemoryError as error:
            row = {"arm": arm, "trained": False, "error": str(error).splitlines()[0]}
            output.write_text(json.dumps(row), encoding="utf-8")
            raise ValueError(f"rank {transport.rank} has no memory: {error}") from None
        pipeline.flush()
        held = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        names = "peak_bytes_per_rank", "reserved_bytes_per_rank"
        peaks = dict(zip(names, zip(*gather_json(transport, held), strict=True), strict=True))
        pipeline.close()
    if transport.rank == 0:
        row = {"arm": arm, "trained": True, "losses": losses, "allocator": ALLOCATOR, **peaks}
        output.write_text(json.dumps(row), encoding="utf-8")
