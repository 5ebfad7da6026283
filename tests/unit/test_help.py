"""Help lists commands in the order of use, a line each, and options under headings, the common ones
first."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from freescale.cli.main import bench, main


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


def test_commands_stand_in_sections_in_the_order_of_use():
    sections = split_sections(read_help())
    del sections["Options"]
    assert sections == {
        "Get started": ["doctor", "demo"],
        "Train a model": ["inspect", "train", "eval", "checkpoints", "report", "compare"],
        "Use a model": ["recommend", "serve", "export"],
        "Generate, plan and measure": ["generate", "simulate", "bench"],
    }


def test_every_command_has_one_line():
    rows = re.findall(r"\n  (\w+) +(\S.*)", read_help().split("Get started:")[1])
    assert [name for name, _ in rows] == list(main.commands)
    assert all(sentence.endswith(".") for _, sentence in rows)


@pytest.mark.parametrize("command", [("bench",), ("simulate",)])
def test_no_sentence_is_cut(command):
    text = read_help(*command)
    assert "..." not in text.split("Commands:")[1]
    for sentence in re.split(r"\n  (?=\S)", text.split("Commands:")[1].rstrip())[1:]:
        assert sentence.endswith("."), sentence


def test_the_name_of_another_program_leads_to_the_option():
    done = CliRunner().invoke(main, ["train", "--batch-size", "4"])
    assert done.exit_code == 2
    assert "use --global-batch (samples of a step, over all ranks)." in done.stderr
    assert "--cache" not in done.stderr
    other_names, options = main.commands["train"]._other_names, main.commands["train"].params
    flags = {flag for option in options for flag in option.opts}
    assert set(other_names.values()) <= flags
    assert not {f"--{name}" for name in other_names} & flags, "an option of that name exists"


HEADINGS = ["Data", "Model", "Training", "Distribution", "Output", "Help"]


def test_help_of_train_shows_the_common_options_and_how_to_see_the_others():
    text = read_help("train")
    sections = split_sections(text)
    assert list(sections) == HEADINGS
    shown = [option for heading in HEADINGS[:-1] for option in sections[heading]]
    assert {"--data", "--width", "--global-batch", "--nproc", "--folder"} <= set(shown)
    assert 10 <= len(shown) <= 21
    others = len(main.commands["train"].params) - 1 - len(shown)  # 1: --help-all itself
    assert f"{others} more options: main train --help-all" in text


def test_help_all_of_train_shows_every_option_under_its_heading():
    done = CliRunner().invoke(main, ["train", "--help-all"])
    assert done.exit_code == 0 and "more options" not in done.stdout
    sections = split_sections(done.stdout)
    assert list(sections) == HEADINGS and sections.pop("Help") == ["--help-all", "-h,"]
    listed = [option for rows in sections.values() for option in rows]
    flags = {parameter.opts[0] for parameter in main.commands["train"].params} - {"--help-all"}
    assert len(listed) == len(set(listed)) and set(listed) == flags
    assert "--schedule" in sections["Distribution"] and "--log-every" in sections["Output"]


def test_bench_without_its_distribution_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("freescale.cli.bench.entry_points", lambda **_: ())
    for arguments in (["ladder", "--device", "cuda"], ["--help"], []):
        done = CliRunner().invoke(bench, arguments)
        assert done.exit_code == 1 and "`pip install -e ./benchmarks`" in done.output
