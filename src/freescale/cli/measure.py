"""The commands `bench` and `report`: what was measured, and where the time went. Heavy imports
happen inside the commands."""

from __future__ import annotations

from pathlib import Path

import click

from freescale.cli.errors import guarded


@click.command()
@click.argument(
    "runs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RUN [RUN ...]"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="report.html",
    show_default=True,
    help="file to write",
)
@click.option("--open", "show", is_flag=True, help="show it in the browser")
def report(runs: tuple[Path, ...], out: Path, show: bool) -> None:
    """Write one HTML page that shows where the time of a run went, or of several beside each
    other."""

    def action() -> None:
        from freescale.report.page import render_page
        from freescale.report.runs import read_runs

        if not out.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {out.absolute().parent} to write {out.name} into")
        if out.is_dir():
            raise ValueError(f"--out {out} is a folder: name a file")
        out.write_text(render_page(read_runs(list(runs))), encoding="utf-8")
        click.echo(f"{out}: {out.stat().st_size / 1024:,.0f} KiB")
        if show:
            import webbrowser

            webbrowser.open(out.absolute().as_uri())

    guarded(action)


@click.group()
def bench() -> None:
    """Measure what this machine does."""


@bench.command("all")
@click.option("--only", multiple=True, metavar="NAME", help="this one; may be given several times")
@click.option(
    "--skip-done",
    is_flag=True,
    help=("leave out what this commit has measured on this machine: to go on after an end"),
)
@click.option(
    "--list",
    "listed",
    is_flag=True,
    help=("show what there is, and what would run here; run nothing"),
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False),
    help=("Parquet for those on real histories"),
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help=("for the results  [default: benchmarks/results]"),
)
def every(
    only: tuple[str, ...], skip_done: bool, listed: bool, file: str | None, folder: Path | None
) -> None:
    """Every benchmark of the repository that can run on this machine, one after another; what it
    leaves out, and why."""

    def action() -> int:
        from freescale.bench.all import bench_all
        from freescale.bench.repository import repository

        return bench_all(repository(), only, skip_done, listed, file, folder)

    guarded(action)


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
def kernels(device: str, only: tuple[str, ...], output: Path) -> None:
    """Time, rate, share of the measured ceiling and speed-up over plain torch of each Triton
    kernel."""

    def action() -> None:
        from freescale.bench.kernels import bench_kernels

        bench_kernels(device, only, output)

    guarded(action)


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
    help=("serial against the full system, without TorchRec; keeps no results"),
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
def ladder(
    workload: str, file: str | None, repetitions: int, short: bool, device: str, nproc: int
) -> None:
    """TorchRec, then FreeScale with one technique more on each rung, on the same model and data:
    samples/s, waits, memory, loss."""

    def action() -> None:
        from freescale.bench.ladder import run_gpu_ladder, run_ladder

        if device == "cuda":
            if file or short or workload != "paper":
                raise ValueError("on a GPU the ladder has the workload `paper` only")
            raise SystemExit(run_gpu_ladder(nproc))
        arguments = ["--workload", workload, "--repetitions", str(repetitions)]
        arguments += ["--file", file] if file else []
        if status := run_ladder([*arguments, "--short"] if short else arguments, peer=not short):
            raise SystemExit(status)

    guarded(action)


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
def overlap(nproc: int, device: str, only: tuple[str, ...], output: Path) -> None:
    """What communication costs the compute beside it: NCCL's AllToAll, hostwire's, and how fast
    each is by itself."""

    def action() -> int:
        from freescale.bench.overlap import bench_overlap

        return bench_overlap(nproc, device, only, output)

    guarded(action)
