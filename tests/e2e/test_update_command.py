"""`freescale train --from RUN` from the command line: on two ranks, after a failure, and what it
refuses; then what is done with the run."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.command import freescale
from helpers.small_runs import SMALL
from helpers.updates import UNTIL, write_days


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("update")
    old, _ = write_days(folder)
    done = freescale("train", "--data", old, "--folder", folder / "first", "--cache",
                     folder / "cache", *SMALL, "--epochs", 2)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "first"


def test_every_night(first):
    """Update on two ranks, evaluate, recommend, export; the first run is gone by then."""
    folder, kept = first.parent, first.parent / "kept"
    shutil.copytree(first, kept)
    run = folder / "second"
    done = freescale("train", "--from", kept, "--data", folder / "new", "--folder", run,
                     "--epochs", 1, "--nproc", 2, "--restarts", 1)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"continues {kept} from step" in done.stdout
    origin = json.loads((run / "config.json").read_text())["origin"]
    assert origin["since"] < UNTIL, "held-out events of the first run are not trained on"
    shutil.rmtree(kept)
    for command in (
        ("eval", run, "--device", "cpu"),
        ("recommend", run, "--out", folder / "recs.csv"),
        ("export", run, "--out", folder / "model"),
        ("report", run, "--out", folder / "report.html"),
        ("train", "--folder", run, "--resume", "--epochs", 2),
    ):
        done = freescale(*command)
        assert done.returncode == 0, (command, done.stderr)
    assert f"continues {kept} from step" in (folder / "report.html").read_text()
    users = {line.split(",")[0] for line in (folder / "recs.csv").read_text().splitlines()[1:]}
    assert len(users) == 36, "new users, too"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--since", 3, "--data", "x"], "--since needs --from: name the folder of the run"),
        (["--all-events", "--data", "x"], "--all-events needs --from"),
        (["--checkpoint", "best", "--data", "x"], "--checkpoint needs --from"),
        (["--from", "RUN", "--width", 16], "--width 16 with --from RUN: its model was"),
        (["--from", "RUN", "--recipe", "hstu-large"], "with --from RUN: its model was"),
        (["--from", "RUN", "--folder", "RUN"], "RUN already holds a run: name another folder"),
        (["--from", "RUN", "--folder", "RUN", "--resume"], "knows what it continues; leave --from"),
        (["--from", "nowhere"], "nowhere is not the folder of a run: there is no such folder"),
        (["--from", "RUN"], "nothing newer than "),
    ],
)  # fmt: skip
def test_what_is_refused(first, options, message):
    given = [str(first) if option == "RUN" else option for option in options]
    done = freescale("train", *given)
    assert done.returncode == 1, done.stdout
    assert message.replace("RUN", str(first)) in done.stderr
    assert "Traceback" not in done.stderr
