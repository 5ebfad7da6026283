"""The command bench and its benchmarks."""

from __future__ import annotations

from pathlib import Path

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.layout import CommandGroup


@click.group(cls=CommandGroup)
def bench() -> None:
    """Run the benchmarks on this machine."""


@bench.command("all")
@click.option("--only", multiple=True, metavar="NAME", help="this one; may be given several times")
@click.option(
    "--skip-done",
    is_flag=True,
    help="leave out what this commit has measured on this machine: to go on after an end",
)
@click.option(
    "--list",
    "listed",
    is_flag=True,
    help="show what there is, and what would run here; run nothing",
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False),
    help="Parquet for those on real histories",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="for the results  [default: benchmarks/results]",
)
@exit_cleanly
def run_all(
    only: tuple[str, ...], skip_done: bool, listed: bool, file: str | None, folder: Path | None
) -> int:
    """Run every benchmark of the repository that this machine allows, and say which it leaves out
    and why."""
    from freescale.bench.all import bench_all
    from freescale.bench.repository import repository

    return bench_all(repository(), only, skip_done, listed, file, folder)


@bench.command()
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    default="cuda",
    show_default=True,
    help="cpu: tiny, interpreted",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(("moves", "rows", "attention", "pieces", "layer")),
    help="some parts",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default="kernels.json",
    show_default=True,
    help="JSON file to write",
)
@exit_cleanly
def kernels(device: str, only: tuple[str, ...], output: Path) -> None:
    """Measure each Triton kernel: time, rate, share of the measured ceiling, speed-up over plain
    torch."""
    from freescale.bench.kernels import bench_kernels

    bench_kernels(device, only, output)


@bench.command()
@click.option(
    "--workload", type=click.Choice(("paper", "retail", "own")), default="paper", show_default=True
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False),
    help="Parquet of the workloads retail and own",
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="turns of every arm",
)
@click.option(
    "--short",
    is_flag=True,
    help="serial against the full system, without TorchRec; keeps no results",
)
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="cuda: ranks that share one GPU",
)
@click.option(
    "--nproc", type=click.IntRange(min=2), default=4, show_default=True, help="ranks on a GPU"
)
@exit_cleanly
def ladder(
    workload: str, file: str | None, repetitions: int, short: bool, device: str, nproc: int
) -> int:
    """Compare TorchRec with FreeScale, one technique more on each rung, on the same model and data.

    Shows samples/s, waits, memory and loss of each.
    """
    from freescale.bench.ladder import run_gpu_ladder, run_ladder

    if device == "cuda":
        if file or short or workload != "paper":
            raise ValueError("on a GPU the ladder has the workload `paper` only")
        return run_gpu_ladder(nproc)
    arguments = ["--workload", workload, "--repetitions", str(repetitions)]
    arguments += ["--file", file] if file else []
    arguments += ["--short"] if short else []
    return run_ladder(arguments, peer=not short)


@bench.command()
@click.option(
    "--nproc",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="ranks; they share the GPUs if there are fewer",
)
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    default="cuda",
    show_default=True,
    help="cpu: tiny, to try it",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(("products", "layer", "alone", "throughput", "witness")),
    help="some parts",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default="overlap.json",
    show_default=True,
    help="JSON file to write",
)
@exit_cleanly
def overlap(nproc: int, device: str, only: tuple[str, ...], output: Path) -> int:
    """Measure how much NCCL's and hostwire's AllToAll slow down the compute beside them, and how
    fast each is alone."""
    from freescale.bench.overlap import bench_overlap

    return bench_overlap(nproc, device, only, output)
