"""`freescale train --follow`: killed while files come, resumed, and its report."""

from __future__ import annotations

import json
import os
import signal
import time

import pyarrow as pa
from helpers.command import Begun, freescale, wait_for
from helpers.streams import START, add_features, make_events, move, split, write_attributes

SMALL = ["--device", "cpu", "--global-batch", "8", "--width", "8", "--negatives", "8", "--layers"]
SMALL += ["1", "--heads", "1", "--max-length", "12", "--window", "1h", "--event-id", "event"]
SMALL += ["--rows", "item=dynamic:64,action=dynamic:8", "--stop-when-idle", "2"]
SMALL += ["--dense-sums", "collective"]


def count_windows(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"stream": {') if path.exists() else 0


def read_lines(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def test_a_run_on_two_ranks_is_killed_and_goes_on(tmp_path):
    """Files come late and twice; what it trains is what an undisturbed run trains."""
    parts = split(add_features(make_events()), 6)
    for name, part in parts:
        move(tmp_path / "calm-in", name, part)
    common = [*SMALL, "--cache", tmp_path / "cache", "--nproc", 2, "--new-values", 9]
    for name, value in write_attributes(tmp_path).items():
        common += [f"--{name}", value]
    done = freescale(
        *("train", "--follow", tmp_path / "calm-in", "--folder", tmp_path / "calm", *common)
    )
    assert done.returncode == 0, done.stderr
    source, run = tmp_path / "in", tmp_path / "run"
    command = ["train", "--follow", source, "--folder", run, "--resume", "auto", *common]
    for name, part in parts[:3]:
        move(source, name, part)
    with Begun(*command) as begun:
        wait_for(lambda: count_windows(run) >= 2)
        for rank in begun.ranks():
            os.kill(rank, signal.SIGKILL)
    move(source, *parts[1])  # again
    with Begun(*command) as begun:
        wait_for(lambda: count_windows(run) >= 5)
        move(source, parts[3][0], pa.concat_tables([parts[2][1], parts[3][1]]))  # and twice
        time.sleep(0.3)
        os.kill(begun.pid, signal.SIGTERM)
        done = begun.ended()
    assert done.returncode == 75 and "saved" in done.stdout, done.stderr
    for name, part in parts[4:]:
        move(source, name, part)
    done = freescale(*command)
    assert done.returncode == 0, done.stderr
    for key in ("validation", "stream"):
        found, expected = (read_lines(folder, key) for folder in (run, tmp_path / "calm"))
        assert [line["step"] for line in found] == [line["step"] for line in expected]
        for ours, theirs in zip(found, expected, strict=True):
            ours, theirs = ours[key], theirs[key]
            assert ours == theirs if key == "validation" else ours["digest"] == theirs["digest"]
    windows = [line["stream"] for line in read_lines(run, "stream")]
    assert [window["number"] for window in windows] == list(range(11))
    assert sum(window["duplicates"] for window in windows) == 100
    page = freescale("report", run, "--out", tmp_path / "report.html")
    assert page.returncode == 0, page.stderr
    text = (tmp_path / "report.html").read_text()
    assert "Windows: channel/unknown" in text and "Windows: price/mean" in text
    assert "Windows of the stream" in text and "Windows: new items" in text
    begin = time.strftime("%Y-%m-%d %H:%M", time.gmtime(START))
    assert begin in text and "Windows: admitted" in text


def test_what_the_command_refuses(tmp_path):
    done = freescale("train", "--follow", tmp_path, "--folder", tmp_path / "run")
    assert done.returncode and "--rows item=dynamic:1M" in done.stderr
    done = freescale(
        *("train", "--follow", "s3://bucket/events", "--folder", tmp_path / "run", *SMALL)
    )
    assert done.returncode and "name a folder, or kafka://" in done.stderr
