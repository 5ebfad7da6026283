"""The layout of help: commands in the order of use, options under headings."""

from __future__ import annotations

from typing import Any

import click

_WHOLE = 10_000  # characters of a command's sentence in a list: it is not cut


class CommandGroup(click.Group):
    """Lists its commands in the order in which they were added, each with its whole sentence."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command.get_short_help_str(_WHOLE)) for name, command in self._visible()]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def _visible(self) -> list[tuple[str, click.Command]]:
        return [(name, command) for name, command in self.commands.items() if not command.hidden]


class GroupedOption(click.Option):
    """An option that stands under a heading in the help of a `GroupedCommand`."""

    def __init__(self, *args: Any, heading: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class GroupedCommand(click.Command):
    """Lists its options under their headings, in the order in which these first appear."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                heading = parameter.heading if isinstance(parameter, GroupedOption) else "Other"
                sections.setdefault(heading, []).append(record)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
