"""The command report."""

from __future__ import annotations

from pathlib import Path

import click

from freescale.cli.errors import exit_cleanly


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
    out.write_text(render_page(read_runs(list(runs))), encoding="utf-8")
    click.echo(f"wrote {out} ({out.stat().st_size / 1024:,.0f} KiB)")
    if show:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())
