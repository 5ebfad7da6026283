"""Runs that follow a source: windows are evaluated before they are trained; kills, ranks and a
resume change nothing."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.command import freescale
from helpers.ranks import gather_ranks, run_ranks
from helpers.streams import (
    HOUR,
    START,
    add_features,
    configure,
    make_events,
    move,
    open_one,
    read_on,
    read_windows,
    split,
    train,
    train_alone,
    write_attributes,
)

from freescale import load
from freescale.config import RunConfig
from freescale.data import hash_ids
from freescale.data.batches.loader import Histories
from freescale.data.store.build import build_store
from freescale.train.build import build_specs, evaluate_part, load_features, prepare_data
from freescale.train.callbacks import Callback
from freescale.train.follow import prepare_followed
from freescale.train.time_order import find_windows
from freescale.train.trainer import Trainer
from freescale.transport.local import LocalTransport


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("events")
    for name, part in split(add_features(make_events()), 6):
        move(folder / "in", name, part)
    write_attributes(folder)
    return folder / "in"


def configure_run(source, **settings):
    """Events, items and users have features; more values come than have rows."""
    known = write_attributes(source.parent)
    known |= {"new_values": 9, "keep_checkpoints": 99, "full_every": 20}
    known |= {"rows": "item=dynamic:64,action=dynamic:8"}
    return configure(source, source.parent / "cache", **known, **settings)


@pytest.fixture(scope="module")
def calm(source):
    """An undisturbed run: its bits, its steps and its folder."""
    config = configure_run(source)
    return *train_alone(config, source.parent / "calm"), source.parent / "calm"


def read_metrics(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class StopAt(Callback):
    """Stops after a step, or raises there."""

    def __init__(self, step, error=None):
        self.step, self.error = step, error

    def on_step(self, trainer, step):
        if step.step == self.step:
            if self.error is not None:
                raise self.error
            trainer.stop()


class Windows(Callback):
    def __init__(self):
        self.seen = []

    def on_window(self, trainer, entry):
        path = trainer.checkpoints.latest()
        self.seen.append((entry["stream"]["number"], entry["stream"]["again"], path.name))
        assert path.name.endswith(f"{trainer.step}")


def decode(features, of, codes):
    """The categories of rows [n, places]."""
    return [
        [fitted.name_categories([code]) for code in codes[:, place].tolist()]
        for place, fitted in enumerate(getattr(features, of))
    ]


def test_batches_are_those_of_a_store_in_order_of_time(source, tmp_path):
    """As if all events had been there from the beginning."""
    for name, part in split(add_features(make_events(text=False)), 6):
        move(tmp_path / "in", name, part)
    known = write_attributes(tmp_path, text=False)
    known["features"] = known["features"].replace("price=numeric:4", "price=categorical")
    config = configure(tmp_path / "in", tmp_path / "cache", **known)
    stream = open_one(tmp_path / "s", tmp_path / "in", **known)
    read_on(stream)
    path = tmp_path / "s" / "first" / "histories.parquet"
    features = load_features(config, path)
    specs = build_specs(config) | find_windows(config, path, tmp_path, "train", None)
    found = Histories(path, 8, features=features, **specs)
    at_once = {"data": str(tmp_path / "in"), "split": "none", "rows": "item=dynamic:64"}
    at_once = RunConfig.from_settings(at_once | {"cache": str(tmp_path / "cache")} | known)
    whole = prepare_data(at_once)
    build_store(whole, tmp_path / "store")
    windows = range(START // HOUR, START // HOUR + 11)
    time = found.time.__class__(tmp_path / "store", HOUR, windows)
    all_known = load_features(at_once, whole)
    expected = Histories(whole, 8, features=all_known, **(specs | {"time": time}))
    number, seen = 0, set()
    for window in read_windows(tmp_path / "s"):
        found.open_window(window["window"], number)
        while number < found.stop:
            ours, theirs = found.batch(number), expected.batch(number)
            for name in ("history", "timestamps", "targets", "target_weights"):
                assert torch.equal(ours.sequences[name].values, theirs.sequences[name].values)
                assert torch.equal(ours.sequences[name].lengths, theirs.sequences[name].lengths)
            for of, part, name in (
                ("event", "sequences", "event_features"),
                ("context", "sequences", "context_features"),
                ("item", "sequences", "history_features"),
                ("user", "dense", "user_features"),
            ):
                ours_of, theirs_of = (getattr(batch, part)[name] for batch in (ours, theirs))
                if part == "sequences":
                    ours_of, theirs_of = ours_of.values, theirs_of.values
                values = decode(features, of, ours_of)
                assert values == decode(all_known, of, theirs_of)
                seen |= {f"{of} {value}" for column in values for value in column}
            number += 1
    assert number == expected.stop > 20 and len(seen) > 80


def test_each_window_is_evaluated_before_it_is_trained(source, calm, tmp_path):
    _, step, folder = calm
    windows = read_windows(folder / "stream")
    lines, trained = read_metrics(folder, "validation"), read_metrics(folder, "stream")
    assert [line["stream"]["number"] for line in trained] == list(range(11))
    assert [line["window"]["number"] for line in lines] == list(range(1, 11))
    assert [line["step"] for line in lines] == [line["step"] for line in trained[:-1]]
    assert trained[-1]["step"] == step
    # A run that ends there has the same figures for the next window.
    config = configure_run(source, windows=4)
    run = Trainer(config, tmp_path / "run", transport=LocalTransport())
    run.train()
    assert run.step == trained[3]["step"]
    number = windows[4]["window"]
    path = folder / "stream" / "first" / "histories.parquet"  # of the run that has this window
    found = evaluate_part(config, run.model, path, "validation", window=number)
    assert found == lines[3]["validation"]


def test_a_checkpoint_is_evaluated_on_the_next_window(calm, tmp_path):
    """Of the run, and of a file with the same events."""
    _, last, folder = calm
    line = read_metrics(folder, "validation")[4]
    done = freescale("eval", folder, "--checkpoint", line["step"])
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "eval-test.json").read_text())
    assert found["quality"] == line["validation"]
    events = add_features(make_events())
    before = np.asarray(events["timestamp"]) < line["window"]["to"]
    pq.write_table(events.filter(before), tmp_path / "events.parquet")
    given = ["--data", tmp_path / "events.parquet"]
    done = freescale("eval", folder, "--checkpoint", line["step"], *given)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("eval-test-*.json")
    assert json.loads(path.read_text())["quality"] == line["validation"]
    done = freescale("eval", folder)
    assert done.returncode and "no window has come that this checkpoint" in done.stderr
    # Values of other events keep the rows that they have in the run, in whatever order they come.
    config = RunConfig.read(folder)
    pq.write_table(events.slice(400), tmp_path / "late.parquet")
    other = prepare_followed(config, folder, str(tmp_path / "late.parquet"))
    own = prepare_followed(config, folder, None)
    found, known = (load_features(config, path, folder) for path in (other, own))
    for fitted, expected in zip(found.event, known.event, strict=True):
        assert fitted.categories[: len(expected.categories)] == expected.categories
    assert found.event[0].categories == known.event[0].categories != ()


def test_users_of_the_stream(source, calm, tmp_path):
    """Their histories are those of the windows."""
    folder = calm[2]
    end, known = read_windows(folder / "stream")[-1]["to"], write_attributes(source.parent)
    events = add_features(make_events()).to_pylist()
    kinds = {row["user_id"]: row for row in pq.read_table(known["users"]).to_pylist()}
    names = ["u3", "u9", "u17"]  # the second one has no attributes
    histories = [
        [
            {"item": e["item_id"], "time": e["timestamp"], **e}
            for e in events
            if e["user_id"] == name and e["timestamp"] < end
        ]
        for name in names
    ]
    model = load(folder)
    attributes = [kinds.get(name, {}) for name in names]
    expected = model.recommend(histories, attributes=attributes, k=5)
    found = model.recommend(users=names, k=5)
    assert found.items == expected.items
    assert np.array_equal(found.scores, expected.scores)
    with pytest.raises(ValueError, match="user 'u99' is in no window: give"):
        model.recommend(users=["u99"])
    (tmp_path / "users.txt").write_text("\n".join(names))
    out = tmp_path / "best.parquet"
    done = freescale("recommend", folder, "--out", out, "--k", 5, "--users", tmp_path / "users.txt")
    assert done.returncode == 0, done.stderr
    table = pq.read_table(out).to_pylist()
    by_user = {name: [] for name in names}
    for row in table:
        by_user[row["user"]].append(row["item"])
    assert list(by_user.values()) == found.items
    done = freescale("recommend", folder, "--out", out, "--k", 1)
    assert done.returncode == 0, done.stderr
    users = {row["user_id"] for row in events if row["timestamp"] < end}
    assert set(pq.read_table(out)["user"].to_pylist()) == set(hash_ids(users).tolist())


@pytest.mark.parametrize("at", [3, "end"])
def test_it_resumes(source, calm, tmp_path, at):
    """In the middle of a window, and at its end, where `on_window` is called again."""
    bits, step, folder = calm
    ends = [line["step"] for line in read_metrics(folder, "stream")]
    assert 3 not in ends
    config = configure_run(source)
    stop, windows = StopAt(ends[2] if at == "end" else at), Windows()
    train_alone(config, tmp_path / "run", callbacks=[stop])
    found, steps = train_alone(config, tmp_path / "run", resume=True, callbacks=[windows])
    assert steps == step
    assert_equal(found, bits)
    first = 2 if at == "end" else sum(end <= 3 for end in ends)
    assert [number for number, _, _ in windows.seen] == list(range(first, 11))
    assert [again for _, again, _ in windows.seen] == [at == "end"] + [False] * (10 - first)
    expected = [(line["step"], line["validation"]) for line in read_metrics(folder, "validation")]
    lines = read_metrics(tmp_path / "run", "validation")
    assert [(line["step"], line["validation"]) for line in lines] == expected
    numbers = [line["stream"]["number"] for line in read_metrics(tmp_path / "run", "stream")]
    assert numbers == list(range(11))


def test_a_failure_before_the_first_checkpoint(source, calm, tmp_path):
    """The windows that were read stay; training begins with the first."""
    config = configure_run(source)
    with pytest.raises(OSError, match="lost"):
        train_alone(config, tmp_path / "run", callbacks=[StopAt(2, OSError("lost"))])
    assert_equal(train_alone(config, tmp_path / "run", resume="auto")[0], calm[0])


def test_on_other_ranks(source, calm, tmp_path):
    """In float32: sums over ranks round otherwise."""
    config = configure_run(source)
    for found, step in run_ranks(2, partial(train, config=config, folder=tmp_path / "two")):
        assert step == calm[1]
        for name, value in calm[0].items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    stop = partial(train, config=config, folder=tmp_path / "run", callbacks=[StopAt(7)])
    run_ranks(2, stop)
    found, step = train_alone(config, tmp_path / "run", resume=True)
    assert step == calm[1]
    for name, value in calm[0].items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_a_failure_of_reading_reaches_all_ranks(source, tmp_path):
    for name, part in split(make_events(), 6):
        move(tmp_path / "in", name, part)
    move(tmp_path / "in", "part-003.parquet", make_events(3).drop_columns("action"))
    config = configure(tmp_path / "in", tmp_path / "cache")
    errors = [
        error
        for error, _ in gather_ranks(2, partial(train, config=config, folder=tmp_path / "run"))
    ]
    assert "part-003.parquet: columns" in errors[0] and "rank 0 stopped:" in errors[1]


def test_a_changed_stream_is_not_resumed(source, tmp_path):
    config = configure_run(source)
    train_alone(config, tmp_path / "run", callbacks=[StopAt(5)])
    path = tmp_path / "run" / "stream" / "windows.jsonl"
    lines = path.read_text().splitlines(True)
    digest = json.loads(lines[1])["digest"]
    path.write_text("".join(lines).replace(digest, digest[::-1]))
    with pytest.raises(ValueError, match="does not have window 1 of the checkpoint"):
        train_alone(config, tmp_path / "run", resume=True)
    path.parent.rename(tmp_path / "away")
    with pytest.raises(ValueError, match="stream is missing"):
        train_alone(config, tmp_path / "run", resume=True)
