"""Deltas: applied one after another they are the exports of the run, to the bit."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from helpers.deltas import EVICTING, export, find_differences, list_states, read_export, train
from helpers.ranks import run_ranks
from helpers.time_order import configure, write_events

from freescale import Subscriber
from freescale.recommend.inputs import HistoryReader
from freescale.train import run as run_module
from freescale.train.deltas.folder import DeltaFolder, Missing
from freescale.train.state.disk import Damaged
from freescale.transport.local import LocalTransport

ALONE = LocalTransport()
STEPS = 48


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_events(tmp_path_factory.mktemp("events") / "events.parquet", text=True)


def prepare(folder, data, **settings):
    """Checkpoints between windows are published, too."""
    given = {"deltas": "window", "global_batch": 2, "checkpoint_every": 9, "full_every": 3}
    given |= {"rows": EVICTING, "keep_checkpoints": 99, "keep_deltas": 99}
    return configure(folder, data, **{**given, **settings})


@pytest.fixture(scope="module")
def run(data):
    """A run that resumed, on 1, 2 and 1 ranks."""
    folder = data.parent / "run"
    config = prepare(data.parent, data, async_checkpoints=True)
    train(ALONE, config, folder, 20)
    run_ranks(2, train, config, folder, 33)
    train(ALONE, config, folder, STEPS)
    return folder


@pytest.fixture
def copied(run, tmp_path):
    """What is published, to be damaged."""
    shutil.copytree(run / "deltas", tmp_path / "run" / "deltas")
    return tmp_path / "run"


def cut(run: Path, number: int) -> DeltaFolder:
    """The folder as it was when a number was published."""
    files = DeltaFolder(run / "deltas")
    for later in files.list_numbers()[1]:
        if later > number:
            files.path(later).rename(run / f"later-{later}")
    return files


def bring_back(run: Path) -> None:
    for path in run.glob("later-*"):
        path.rename(run / "deltas" / f"{int(path.name[6:]):08d}")


def test_deltas_are_the_exports_of_the_run(run, copied, tmp_path):
    """Every number, through evictions, full checkpoints and other numbers of ranks."""
    states = list_states(run)
    assert [number for number, _ in states] == list(range(len(states))) and len(states) > 6
    assert states[-1][1] == STEPS
    cut(copied, 0)
    subscriber, removed = Subscriber(copied), 0
    for number, step in states:
        if number:
            (copied / f"later-{number}").rename(copied / "deltas" / f"{number:08d}")
            assert subscriber.update() == 1
            removed += subscriber.last.about["files"].keys() >= {"table.item.safetensors"}
        assert (subscriber.number, subscriber.last.step) == (number, step)
        found = read_export(subscriber.write(tmp_path / f"found-{number}"))
        expected = export(run, tmp_path / f"expected-{number}", step)
        assert find_differences(found, expected) == []
    before = read_export(tmp_path / "expected-0")
    assert find_differences(found, before), "training changes nothing"
    kept = [set(read_export(tmp_path / f"expected-{n}")["items.parquet"]["key"]) for n, _ in states]
    assert any(one - other for one, other in zip(kept, kept[1:])), "nothing was evicted"
    assert any(other - one for one, other in zip(kept, kept[1:])), "nothing came"


def test_a_full_export_made_of_deltas(run, copied, tmp_path):
    cut(copied, 3)
    assert Subscriber(copied).compact().name == "00000003.full"
    bring_back(copied)
    number, step = list_states(run)[-1]
    subscriber = Subscriber(copied)
    assert subscriber.number == number
    found = read_export(subscriber.write(tmp_path / "found"))
    assert find_differences(found, export(run, tmp_path / "expected", step)) == []
    DeltaFolder(copied / "deltas").prune(2)
    full, deltas = DeltaFolder(copied / "deltas").list_numbers()
    assert full == [3] and deltas == list(range(4, number + 1))  # the full one needs them
    assert Subscriber(copied).number == number


def test_a_static_table_and_its_features_of_items(tmp_path):
    data = write_events(tmp_path / "events.parquet")
    items = tmp_path / "items.csv"
    items.write_text("item_id,kind\n" + "".join(f"{n},{'abc'[n % 3]}\n" for n in range(60)))
    config = prepare(tmp_path, data, rows="", items=str(items), full_every=1)
    train(ALONE, config, tmp_path / "run", 12)
    train(ALONE, config, tmp_path / "run", 24)
    subscriber, (number, step) = Subscriber(tmp_path / "run"), list_states(tmp_path / "run")[-1]
    assert subscriber.number == number > 1
    recommender = subscriber.load()
    expected = export(tmp_path / "run", tmp_path / "expected", step)
    assert find_differences(read_export(subscriber.write(tmp_path / "found")), expected) == []
    from freescale import load

    again = load(tmp_path / "expected")
    assert torch.equal(recommender.item_vectors(), again.item_vectors())
    histories = [[(3, 1_699_990_000, 1), (5, 1_699_990_500, 2)]]
    assert recommender.recommend(histories).items == again.recommend(histories).items


# ---- a run that ends between a checkpoint and what it publishes


def test_what_was_not_published_is_published_when_the_run_goes_on(data, run, tmp_path):
    """The run was killed after its checkpoint was in its place: content and numbers go on."""
    config = prepare(tmp_path, data)
    train(ALONE, config, tmp_path / "run", 20)
    states = list_states(tmp_path / "run")
    last = tmp_path / "run" / "deltas" / f"{states[-1][0]:08d}"
    expected = read_export(last)
    shutil.rmtree(last)
    train(ALONE, config, tmp_path / "run", 33)
    assert list_states(tmp_path / "run") == [s for s in list_states(run) if s[1] <= 33]
    assert find_differences(read_export(last), expected) == []


def test_a_step_back_becomes_a_full_export(data, tmp_path):
    """Subscribers follow the run to where it has gone back to."""
    from dataclasses import replace

    from freescale.train.trainer import Trainer

    config = prepare(tmp_path, data)
    train(ALONE, config, tmp_path / "run", 20)
    subscriber = Subscriber(tmp_path / "run")
    count = subscriber.number
    back = replace(config, train=replace(config.train, steps=22, lr=0.01))
    Trainer(back, tmp_path / "run", transport=ALONE, resume="9").train()
    full, _ = DeltaFolder(tmp_path / "run" / "deltas").list_numbers()
    assert full[-1] == count + 1
    subscriber.update()
    found = read_export(subscriber.write(tmp_path / "found"))
    assert find_differences(found, export(tmp_path / "run", tmp_path / "expected", 22)) == []


def test_old_deltas_go_and_a_full_one_stays(data, tmp_path):
    config = prepare(tmp_path, data, keep_deltas=2, keep_checkpoints=1)
    train(ALONE, config, tmp_path / "run", STEPS)
    full, deltas = DeltaFolder(tmp_path / "run" / "deltas").list_numbers()
    assert len(full) == 1 and deltas[-1] - full[0] < 2 <= len(deltas) <= 3
    found = read_export(Subscriber(tmp_path / "run").write(tmp_path / "found"))
    assert find_differences(found, export(tmp_path / "run", tmp_path / "expected", STEPS)) == []


def test_seconds_between_deltas(data, tmp_path, monkeypatch):
    """By rank 0's clock, which is read every five steps."""
    clock = itertools.count(time.monotonic() + 1000, 2)
    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    config = prepare(tmp_path, data, deltas=3, checkpoint_every=1000)
    train(ALONE, config, tmp_path / "run", 28)
    # a save and each reading advance the clock by 2
    assert [step for _, step in list_states(tmp_path / "run")] == [5, 15, 25, 28]


def test_the_guide_follows_a_run(run, tmp_path, monkeypatch, capsys):
    page = Path(__file__).resolve().parents[2] / "docs" / "guide" / "deltas.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "shop").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, str(page), "exec"), {})
    number, step = list_states(run)[-1]
    assert capsys.readouterr().out.split() == [str(number), str(step)]
    expected = export(run, tmp_path / "expected", step)
    assert find_differences(read_export(tmp_path / "model"), expected) == []


# ---- damage


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["dense.safetensors", "table.item.safetensors", "delta.json"])
def test_a_damaged_delta_changes_nothing(copied, tmp_path, name):
    cut(copied, 2)
    subscriber = Subscriber(copied)
    before = read_export(subscriber.write(tmp_path / "before"))
    bring_back(copied)
    good = shutil.copytree(copied / "deltas" / "00000004", tmp_path / "good")
    damage(copied / "deltas" / "00000004" / name)
    with pytest.raises(Damaged, match="00000004"):
        subscriber.update()
    assert subscriber.number == 3  # the one before is good
    assert find_differences(read_export(subscriber.write(tmp_path / "after")), before)
    shutil.rmtree(copied / "deltas" / "00000004")
    with pytest.raises(Missing, match="00000004"):
        subscriber.update()
    good.rename(copied / "deltas" / "00000004")
    assert subscriber.update() > 1


def test_a_missing_delta_is_in_a_later_full_export(run, copied, tmp_path):
    cut(copied, 1)
    subscriber = Subscriber(copied)
    bring_back(copied)
    Subscriber(copied).compact()
    DeltaFolder(copied / "deltas").prune(1)
    number, step = list_states(run)[-1]
    assert subscriber.update() == number - 1
    found = read_export(subscriber.write(tmp_path / "found"))
    assert find_differences(found, export(run, tmp_path / "expected", step)) == []


def test_a_full_export_that_goes_while_it_is_read(run, copied, tmp_path, monkeypatch):
    """The run publishes another one and removes it: what is listed may be gone."""
    subscriber = Subscriber(copied)
    subscriber.compact()
    expected = read_export(subscriber.write(tmp_path / "expected"))
    listed, before = subscriber._files.list_numbers(), [([0], [0])]

    def list_numbers(self):
        return before.pop() if before else listed

    shutil.rmtree(copied / "deltas" / "00000000.full")
    monkeypatch.setattr(DeltaFolder, "list_numbers", list_numbers)
    found = read_export(subscriber.write(tmp_path / "found"))
    assert find_differences(found, expected) == []
    before.append(([0], [0]))
    assert len(subscriber.load().items) and not before


def test_a_loaded_model_reads_no_vocabulary_that_may_go(copied):
    loaded = Subscriber(copied).load().loaded
    shutil.rmtree(copied / "deltas")
    assert "item_id" in loaded.texts.column("column").to_pylist()
    texts = pa.table({"column": ["action"], "id": [7], "text": ["buy"]})
    assert HistoryReader(replace(loaded, texts=texts))._action_codes == {"buy": 7}


def test_a_delta_of_another_run_is_refused(copied, tmp_path):
    cut(copied, 1)
    subscriber = Subscriber(copied)
    bring_back(copied)
    about = copied / "deltas" / "00000002" / "delta.json"
    other = copied / "deltas" / "00000003"
    shutil.rmtree(copied / "deltas" / "00000002")
    other.rename(copied / "deltas" / "00000002")
    with pytest.raises(Damaged):  # its number is another
        subscriber.update()
    found = json.loads(about.read_text())
    assert found["parent"]["number"] == 2


def test_a_folder_without_deltas(tmp_path):
    with pytest.raises(Missing, match="train with --deltas"):
        Subscriber(tmp_path)


def test_a_run_in_a_store_neither_publishes_nor_follows(data, tmp_path):
    """Its files are uploaded while the publisher renames them."""
    (tmp_path / "run").mkdir()
    mark = {"store": "s3://bucket/run", "files": {}}
    (tmp_path / "run" / ".store").write_text(json.dumps(mark))
    config = prepare(tmp_path, data)
    with pytest.raises(ValueError, match="--deltas with s3://bucket/run"):
        train(ALONE, config, tmp_path / "run", STEPS)
    follows = replace(config.data, data="", follow=str(tmp_path / "in"))
    config = replace(config, data=follows, train=replace(config.train, deltas=None))
    with pytest.raises(ValueError, match="--follow with s3://bucket/run"):
        train(ALONE, config, tmp_path / "run", STEPS)


def test_what_cannot_be_published_ends_the_run(data, tmp_path, monkeypatch):
    from freescale.train.deltas import publisher

    def fail(*arguments):
        raise PermissionError("no access")

    monkeypatch.setattr(publisher, "write_tensors", fail)
    with pytest.raises(ValueError, match="cannot publish"):
        train(ALONE, prepare(tmp_path, data), tmp_path / "run", STEPS)
