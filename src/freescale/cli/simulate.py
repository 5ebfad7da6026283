"""The command simulate, and simulate calibrate."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from freescale.cli.bench import FORWARDED, run_benchmarks
from freescale.cli.errors import exit_cleanly
from freescale.cli.layout import CommandGroup
from freescale.cli.options import add_settings, select_given
from freescale.config import SimulateConfig


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option(
    "--gpus",
    multiple=True,
    type=click.IntRange(1),
    default=(256,),
    show_default=True,
    help="GPUs; may be given several times",
)
@add_settings(SimulateConfig)
@click.pass_context
def simulate(context: click.Context, /, gpus: tuple[int, ...], **given: Any) -> None:
    """Predict the time of a training step on a cluster.

    Shows where the time goes and what each technique gains over TorchRec.
    """
    if context.invoked_subcommand is None:
        named = context.get_parameter_source("gpus") is not ParameterSource.DEFAULT
        _simulate(gpus, given) if given["recipe"] is None else _plan(gpus if named else (), given)


@exit_cleanly
def _simulate(gpus: tuple[int, ...], given: dict[str, Any]) -> None:
    from freescale.simulate.inputs import list_settings, read_trained_run
    from freescale.simulate.show import print_simulation

    settings = select_given(given)
    if "run" in settings:
        settings = list_settings(read_trained_run(settings["run"])) | settings
    print_simulation(SimulateConfig(**settings), gpus)


_OF_PLANS = (
    *("recipe", "preset", "network", "calibration", "schedule", "balance", "transport"),
    *("popularity", "steps", "seed", "jitter", "out"),
)


@exit_cleanly
def _plan(gpus: tuple[int, ...], given: dict[str, Any]) -> None:
    from freescale.simulate.show import print_plans

    settings = select_given(given)
    if left := sorted(settings.keys() - {*_OF_PLANS}):
        option = left[0].replace("_", "-")
        raise ValueError(f"--recipe {given['recipe']} has no --{option}; leave one of them out")
    presets = [settings["preset"]] if "preset" in settings or "network" in settings else []
    print_plans(SimulateConfig(**settings), gpus, presets or None)


# The installed command reads all arguments, also --help.
@simulate.command(context_settings=FORWARDED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@exit_cleanly
def calibrate(arguments: tuple[str, ...]) -> int:
    """Measure this machine's compute times for the simulator (with the benchmarks installed).

    The curve covers forward, backward, rows and optimizer over lengths, batch and width.
    """
    return run_benchmarks("simulate", "calibrate", *arguments)
