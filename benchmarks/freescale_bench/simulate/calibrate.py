"""Measures and fits the compute curve of this machine, over lengths, batches and widths
(time_compute.py times, freescale/simulate/compute.py reads the file).

    freescale simulate calibrate --device cuda --out h200.json

One process cannot measure the slowdown of compute while a transport communicates: the factors are
those of the overlap benchmark (benchmarks/results, DESIGN section 4), named in the file.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

from freescale.cli.errors import exit_cleanly
from freescale.cli.options import PATH
from freescale_bench.simulate.time_compute import time_model, time_optimizer, time_row_work

TERMS = ("quadratic", "linear", "sample", "constant")  # of a curve
# Histories of equal length (length, samples), and one jagged batch (median, cap, samples).
CASES: dict[str, dict[str, Any]] = {
    "cuda": {
        "equal": [
            *((256, 128), (1024, 64), (1024, 256), (4096, 16), (4096, 64)),
            *((10_500, 8), (21_000, 2), (21_000, 8)),
        ],
        "jagged": [(1000, 21_000, 128), (3000, 21_000, 32), (3000, 21_000, 128)],
        "keys": 500_000,
        "table": 4_000_000,
        "parameters": 16_000_000,
        "shapes": [(512, 4), (256, 4), (128, 2), (64, 2)],  # the last is the default of training
    },
    "cpu": {
        "equal": [(32, 8), (128, 4), (128, 16), (512, 2), (512, 6), (1500, 1), (1500, 2)],
        "jagged": [(150, 1500, 12), (150, 1500, 24)],
        "keys": 20_000,
        "table": 100_000,
        "parameters": 1_000_000,
        "shapes": [(64, 2)],
    },
}
# Slowdown of compute alongside a transport, and the source of the factors.
SLOWDOWN = {
    "cuda": (
        {"collective": 1.159, "hostwire": 1.008},
        "overlap-4ranks-h200.json as of commit 5f196b9: HSTU layers alongside NCCL as it is and "
        "alongside hostwire with the same traffic, medians of nine",
    ),
    "cpu": (
        {"collective": 1.71, "hostwire": 1.71},
        "one core for compute and gloo: staged-hosts.json, serial and stale",
    ),
}


def calibrate(
    device: str,
    name: str,
    *,
    shapes: Sequence[tuple[int, int]] = (),
    layers: int = 2,
    repetitions: int = 5,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures the compute curve of this machine.

    Args:
        device: `cuda` or `cpu`.
        name: Name of the calibration.
        shapes: (width, heads) of the models to measure; by default those of `CASES`.
        layers: Layers of the timed stack.
        repetitions: Of each measurement.
        report: Called with a line about each measurement.

    Returns:
        The calibration as plain data, in the form of the files in calibrations/.

    Raises:
        ValueError: An unknown device, no GPU, or a width that is not a multiple of its heads.
    """
    if device not in CASES:
        raise ValueError(f"device {device!r} is not one of {', '.join(CASES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no GPU on this machine")
    cases = CASES[device]
    # a process that is pinned to a core has one thread
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    measured, fitted = [], []
    for width, heads in shapes or cases["shapes"]:
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        rows = [
            time_model(device, width, heads, layers, lengths, repetitions)
            for lengths in _make_batches(cases)
        ]
        for row in rows:
            took = f"{row['forward_ms']:.2f} + {row['backward_ms']:.2f} ms"
            report(f"width {width}: {row['samples']} samples, {row['tokens']:,} tokens: {took}")
        measured += rows
        fitted.append(fit_shape(rows, width, heads, "bf16" if device == "cuda" else "fp32"))
    width = (shapes or cases["shapes"])[0][0]
    slowdown, source = SLOWDOWN[device]
    return {
        "name": name,
        "source": f"measured by `freescale simulate calibrate --device {device}`",
        "device": device,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "shapes": fitted,
        "rows": time_row_work(device, width, cases["keys"], cases["table"], repetitions),
        "optimizer": time_optimizer(device, cases["parameters"], repetitions),
        "slowdown": slowdown,
        "slowdown_source": source,
        "measured": measured,
    }


def fit_shape(
    rows: Sequence[dict[str, Any]], width: int, heads: int, precision: str
) -> dict[str, Any]:
    """The non-negative coefficients of one layer with the least relative error, and that error."""
    features = np.array([[row["squares"], row["tokens"], row["samples"], 1.0] for row in rows])
    shape: dict[str, Any] = {
        "width": width,
        "heads": heads,
        "precision": precision,
        "longest": max(r["longest"] for r in rows),
    }
    for way in ("forward", "backward"):
        seconds = np.array([row[f"{way}_ms"] / 1e3 / row["layers"] for row in rows])
        coefficients = _solve_non_negative(features / seconds[:, None], np.ones(len(rows)))
        error = np.abs(features @ coefficients / seconds - 1)
        shape[way] = dict(zip(TERMS, coefficients.tolist(), strict=True))
        shape[f"{way}_error_percent"] = {
            "median": float(100 * np.median(error)),
            "largest": float(100 * error.max()),
        }
        head = np.array([row[f"head_{way}_ms"] for row in rows]).sum() / 1e3 / features[:, 1].sum()
        shape[f"head_{way}"] = dict.fromkeys(TERMS, 0.0) | {"linear": float(head)}
    return shape


def _solve_non_negative(rows: NDArray[Any], wanted: NDArray[Any]) -> NDArray[Any]:
    """Least squares without negative coefficients: drops the most negative one until none is
    left."""
    scale = np.abs(rows).max(axis=0)
    kept = list(range(rows.shape[1]))
    while kept:
        solution = np.linalg.lstsq((rows / scale)[:, kept], wanted, rcond=None)[0]
        if solution.min() >= 0:
            result = np.zeros(rows.shape[1])
            result[kept] = solution
            coefficients: NDArray[Any] = result / scale
            return coefficients
        del kept[int(solution.argmin())]
    raise ValueError(
        "the measured times grow with nothing that was varied: measure again on a quiet machine"
    )


def _make_batches(cases: dict[str, Any]) -> list[NDArray[Any]]:
    equal = [np.full(samples, length) for length, samples in cases["equal"]]
    random = np.random.default_rng(0)
    jagged = [
        np.clip(random.lognormal(np.log(median), 1.0, samples).astype(np.int64), 1, cap)
        for median, cap, samples in cases["jagged"]
    ]
    return equal + jagged


def _parse_shape(text: str) -> tuple[int, int]:
    width, colon, heads = text.partition(":")
    if not (colon and width.isdigit() and heads.isdigit() and int(heads)):
        raise ValueError(f"--shape {text!r} is not WIDTH:HEADS, like 512:4")
    return int(width), int(heads)


@click.command()
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    default="cuda",
    show_default=True,
    help="what to measure",
)
@click.option(
    "--out",
    type=PATH,
    required=True,
    help="file to write; its name is the calibration's",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="WIDTH:HEADS",
    help="model shapes  [default: 512:4, 256:4, 128:2, 64:2; cpu 64:2]",
)
@click.option(
    "--repetitions",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="of each measurement",
)
@exit_cleanly
def command(device: str, out: Path, shapes: tuple[str, ...], repetitions: int) -> None:
    """Measure this machine's compute times for the simulator.

    The curve covers forward, backward, rows and optimizer over lengths, batch and width.
    """
    data = calibrate(
        device,
        out.stem,
        shapes=[_parse_shape(text) for text in shapes],
        repetitions=repetitions,
        report=partial(print, flush=True),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for shape in data["shapes"]:
        errors = [
            f"{way} {shape[f'{way}_error_percent']['median']:.1f} %"
            for way in ("forward", "backward")
        ]
        print(
            f"width {shape['width']}, {shape['heads']} heads: the curve is off by "
            f"{', '.join(errors)} (medians)"
        )
    print(out)
