"""The layout of help: commands in sections, options under headings, common ones first."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

_WHOLE = 10_000  # characters: sentences of commands are not cut
_EVERY_OPTION = "freescale: help shows every option"  # key of a context's meta


class CommandGroup(click.Group):
    """Lists its commands by section, in the order in which they were added, with whole
    sentences."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections: dict[str, list[str]] = {}

    def add_section(self, title: str, *commands: click.Command) -> None:
        """Adds commands under `title`; all others are listed under Commands."""
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
                # One width for all sections aligns their sentences.
                formatter.write_dl([(name.ljust(widest), sentence) for name, sentence in rows])

    def _make_rows(self, names: list[str]) -> list[tuple[str, str]]:
        shown = [name for name in names if not self.commands[name].hidden]
        return [(name, self.commands[name].get_short_help_str(_WHOLE)) for name in shown]


class GroupedOption(click.Option):
    """An option under a heading in the help of a `GroupedCommand`. `common`: whether --help shows
    it; --help-all shows every option."""

    def __init__(
        self, *args: Any, heading: str = "Other", common: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.heading, self.common = heading, common


grouped_option = partial(click.option, cls=GroupedOption)


class DataCommand(click.Command):
    """Explains the error when the shell has expanded a pattern into several arguments."""

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
    """A pattern that matches the files, in quotes, as an example; empty if they have nothing in
    common."""
    begin = os.path.commonprefix(files)
    end = os.path.commonprefix([file[len(begin) :][::-1] for file in files])[::-1]
    return f", for instance {shlex.quote(f'{begin}*{end}')}" if begin or end else ""


class GroupedCommand(DataCommand):
    """Lists its options under their headings, in order of appearance: the common ones with --help,
    all with --help-all.

    `other_names`: names of options in other programs (without dashes), and ours. Such a name is
    refused with a hint to ours; similar spelling would suggest a wrong one.
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
