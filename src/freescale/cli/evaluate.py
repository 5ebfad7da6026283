"""The commands on a finished run: eval, export and report."""

from __future__ import annotations

from pathlib import Path

import click

from freescale.cli.errors import exit_cleanly
from freescale.cli.options import PATH, format_arguments
from freescale.cli.progress import prepare_data
from freescale.cli.runs import add_nproc, add_port, read_config, refuse_missing_data
from freescale.config import RunConfig
from freescale.launch.ranks import is_rank, launch
from freescale.stores.runs import open_run

add_checkpoint = click.option(
    "--checkpoint",
    help="last, best or a step  [default: the best of a run with --keep best, else the last]",
)


@click.command("eval")
@click.argument("run_folder", type=PATH)
@add_checkpoint
@click.option("--data", help="another data file than the run's own")
@click.option(
    "--device", type=click.Choice(("auto", "cpu", "cuda")), help="another device than the run's own"
)
@click.option(
    "--part",
    type=click.Choice(("validation", "test")),
    default="test",
    show_default=True,
    help="part of the split",
)
@click.option(
    "--ranks",
    type=PATH,
    help="CSV file for the rank of every user's target, with the ids of the data (retrieval)",
)
@add_nproc
@add_port
@exit_cleanly
def evaluate(
    run_folder: Path,
    checkpoint: str | None,
    data: str | None,
    device: str | None,
    part: str,
    ranks: Path | None,
    nproc: int,
    port: int | None,
) -> int:
    """Evaluate a run's checkpoint on held-out data.

    Ranks every target among all items of the catalogue, and also evaluates the popularity
    baseline. Ranking tasks are evaluated by NE, AUC and GAUC. All metrics are written to
    eval-PART.json in the run's folder, those of other data to eval-PART-DIGEST.json.
    """
    run_folder = open_run(run_folder)
    given = {"data": data, "device": device}
    config = RunConfig.from_settings(given, read_config(run_folder))
    if data is None:
        refuse_missing_data(config, run_folder)
    if not is_rank():
        try:
            prepare_data(config)
        except ValueError as error:
            if data is not None or "no such file" not in str(error):
                raise
            raise ValueError(
                f"{error}; the run was started in another folder, or its data has moved: say "
                "where it is with --data"
            ) from None
        if nproc > 1:
            options = format_arguments({**given, "checkpoint": checkpoint, "ranks": ranks})
            arguments = ["eval", str(run_folder), "--part", part, *options]
            return launch(arguments, nproc, port)
    from freescale.train.commands import run_evaluation

    run_evaluation(config, run_folder, part, lambda: prepare_data(config), checkpoint, ranks)
    return 0


@click.command()
@click.argument("run_folder", type=PATH)
@click.option("--out", type=PATH, required=True, help="folder for the safetensors files")
@click.option(
    "--for",
    "purpose",
    type=click.Choice(("python", "serving")),
    default="python",
    show_default=True,
    help="python: weights, for freescale.load; serving: also a program that needs only torch",
)
@click.option(
    "--aot",
    type=click.Choice(("cpu", "cuda")),
    help="with --for serving: also compile the program for this kind of machine",
)
@click.option("--index", is_flag=True, help="also an index for approximate search (needs faiss)")
@click.option(
    "--min-recall",
    type=click.FloatRange(0, 1),
    default=0.95,
    show_default=True,
    help="share of the exact ten best items that --index finds, at least",
)
@click.option("--overwrite", is_flag=True, help="replace an export that --out holds")
@click.option("--data", help="where the run's data is, if it has moved")
@add_checkpoint
@exit_cleanly
def export(
    run_folder: Path,
    out: Path,
    purpose: str,
    aot: str | None,
    index: bool,
    min_recall: float,
    overwrite: bool,
    data: str | None,
    checkpoint: str | None,
) -> None:
    """Write a run's model as a folder that describes itself.

    freescale.load and freescale serve need nothing else, neither the run nor its data.

    Dense weights are one safetensors file; each table is its own, with rows in the order of
    items.parquet, which has the original ids.

    --for serving adds the model as a program of torch.export (encoder.pt2), vectors and ids of the
    items, serving.json, which lists the inputs, a model card, and example.py, which scores a
    history without FreeScale.
    """
    from freescale.recommend.export import export_run

    serving = purpose == "serving"
    if aot is not None and not serving:
        raise ValueError(f"--aot {aot} is of --for serving: add it, or leave --aot out")
    least = min_recall if index else None
    for path in export_run(
        run_folder, out, checkpoint, overwrite, data, serving=serving, aot=aot, least_recall=least
    ):
        click.echo(path)
    if index:
        from freescale.recommend.approximate import ApproximateIndex

        about = ApproximateIndex.read(out).about
        click.echo(
            f"approximate search finds {about['recall@10']:.1%} of the exact ten best items of "
            f"{about['queries']:,} users"
        )


@click.command()
@click.argument("runs", type=PATH, nargs=-1, required=True, metavar="RUN [RUN ...]")
@click.option("--out", type=PATH, default="report.html", show_default=True, help="file to write")
@click.option("--open", "show", is_flag=True, help="show it in the browser")
@exit_cleanly
def report(runs: tuple[Path, ...], out: Path, show: bool) -> None:
    """Write an HTML page: where the time of one or more runs went.

    RUN is the folder of a run. Of several runs, the first is the one the others are compared with.
    """
    from freescale.report.page import render_page
    from freescale.report.runs import read_runs

    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.absolute().parent}, make it first")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file")
    out.write_text(render_page(read_runs([open_run(run) for run in runs])), encoding="utf-8")
    click.echo(f"wrote {out} ({out.stat().st_size / 1024:,.0f} KiB)")
    if show:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())
