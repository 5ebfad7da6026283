"""The layout of help: commands in sections, options under headings, the common ones first."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

_WHOLE = 10_000  # characters of a command's sentence in a list: it is not cut
_EVERY_OPTION = "freescale: help shows every option"  # key of a context's meta


class CommandGroup(click.Group):
    """Lists its commands section by section, in the order in which they were added, each with its
    whole sentence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections: dict[str, list[str]] = {}

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Adds commands that help lists under `title`; commands added otherwise stand under
        Commands."""
        for command in commands:
            self.add_command(command)
        self._sections[title] = [command.name or "" for command in commands]

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        placed = {name for names in self._sections.values() for name in names}
        rest = [name for name in self.commands if name not in placed]
        sections = {
            title: rows
            for title, names in {**self._sections, "Commands": rest}.items()
            if (rows := self._make_rows(names))
        }
        widest = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
        for title, rows in sections.items():
            with formatter.section(title):
                # One width for all sections: their sentences begin in the same column.
                formatter.write_dl([(name.ljust(widest), sentence) for name, sentence in rows])

    def _make_rows(self, names: list[str]) -> list[tuple[str, str]]:
        commands = [(name, self.commands[name]) for name in names]
        return [
            (name, command.get_short_help_str(_WHOLE))
            for name, command in commands
            if not command.hidden
        ]


class GroupedOption(click.Option):
    """An option that stands under a heading in the help of a `GroupedCommand`.

    `common`: whether --help shows it; --help-all shows every option.
    """

    def __init__(
        self, *args: Any, heading: str = "Other", common: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.heading, self.common = heading, common


class DataCommand(click.Command):
    """Knows a pattern that the shell has made several arguments of."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        given = args.copy()  # click takes them out
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption:
            raise
        except click.UsageError as error:
            files = [word for word in given if not word.startswith("-") and Path(word).exists()]
            if len(files) < 2 or "extra argument" not in error.message:
                raise
            raise click.UsageError(
                f"{error.message.rstrip('.')}. DATA is one word: a file, a folder, or a pattern in "
                f"quotes, which the shell leaves alone{_guess_pattern(files)}.",
                ctx=context,
            ) from None


def _guess_pattern(files: list[str]) -> str:
    """What files were found by, in quotes, as an instance; nothing if they have nothing in
    common."""
    begin = os.path.commonprefix(files)
    end = os.path.commonprefix([file[len(begin) :][::-1] for file in files])[::-1]
    return f", for instance {shlex.quote(f'{begin}*{end}')}" if begin or end else ""


class GroupedCommand(DataCommand):
    """Lists its options under their headings, in the order in which these first appear: the common
    ones with --help, every one with --help-all.

    `other_names`: what other programs call an option, without the dashes, by which this command
    calls it. Such a name is refused with a hint to the right one: similar spelling would suggest
    others.
    """

    def __init__(
        self, *args: Any, other_names: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._other_names = other_names or {}
        show_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=self._show_all,
            help="Show every option and exit.",
        )
        self.params.append(show_all)

    def _show_all(self, context: click.Context, _option: click.Parameter, given: bool) -> None:
        if given:
            context.meta[_EVERY_OPTION] = True
            click.echo(context.get_help(), color=context.color)
            context.exit()

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            known = self._other_names.get(error.option_name.lstrip("-").replace("_", "-"))
            if known is None:
                raise
            options = [one for one in self.params if isinstance(one, click.Option)]
            words = next(one.help or "" for one in options if known in one.opts)
            words = words.partition("  [default")[0]
            raise click.NoSuchOption(
                error.option_name,
                f"No such option '{error.option_name}': use {known} ({words}).",
                ctx=context,
            ) from None

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        every, hidden = context.meta.get(_EVERY_OPTION, False), 0
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is None:
                continue
            if isinstance(parameter, GroupedOption) and not (parameter.common or every):
                hidden += 1
                continue
            heading = parameter.heading if isinstance(parameter, GroupedOption) else "Help"
            sections.setdefault(heading, []).append(record)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options: {context.command_path} --help-all")
