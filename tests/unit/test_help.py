"""Help lists commands in the order of use, with whole sentences, and options under headings."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from freescale.cli.main import main


def read_help(*command: str) -> str:
    done = CliRunner().invoke(main, [*command, "--help"])
    assert done.exit_code == 0
    return done.stdout


def split_sections(text: str) -> dict[str, list[str]]:
    """The first words of the lines of each section: names of commands, or options."""
    sections: dict[str, list[str]] = {}
    rows: list[str] = []
    for line in text.splitlines():
        if heading := re.fullmatch(r"(\S.*):", line):
            rows = sections.setdefault(heading[1], [])
        elif row := re.match(r"  (\S+)", line):
            rows.append(row[1])
    return sections


def test_commands_stand_in_the_order_of_use():
    order = ["doctor", "demo", "generate", "inspect", "train"]
    order += ["eval", "export", "report", "simulate", "bench"]
    assert split_sections(read_help())["Commands"] == order


@pytest.mark.parametrize("command", [(), ("bench",), ("simulate",)])
def test_no_sentence_is_cut(command):
    text = read_help(*command)
    assert "..." not in text.split("Commands:")[1]
    for sentence in re.split(r"\n  (?=\S)", text.split("Commands:")[1].rstrip())[1:]:
        assert sentence.endswith("."), sentence


def test_every_option_of_train_has_a_heading():
    sections = split_sections(read_help("train"))
    assert sections.pop("Other") == ["-h,"]
    assert list(sections) == [
        "Data",
        "Model",
        "Optimization",
        "Schedule, balancing and communication",
        "Evaluation, checkpoints and logs",
        "Ranks and run folder",
    ]
    listed = [option for rows in sections.values() for option in rows]
    flags = {parameter.opts[0] for parameter in main.commands["train"].params}
    assert len(listed) == len(set(listed)) and set(listed) == flags
    assert "--data" in sections["Data"] and "--schedule" in list(sections.values())[3]
