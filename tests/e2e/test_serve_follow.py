"""`freescale serve --follow`: each answer is that of one version, which it names."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pyarrow as pa
import pytest
from helpers import streams
from helpers.command import wait_for
from helpers.deltas import EVICTING, export, find_differences, list_states, read_export, train
from helpers.serving import Serving, serving
from helpers.time_order import START, configure, write_events

from freescale import Subscriber
from freescale.transport.local import LocalTransport

HISTORY = [["i3", START + 5 * 86_400, 1], ["i5", START + 5 * 86_400 + 60, 2]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose items come and go, with every state that it has published."""
    folder = tmp_path_factory.mktemp("served")
    data = write_events(folder / "events.parquet", text=True)
    config = configure(
        folder, data, deltas="window", global_batch=2, checkpoint_every=9, full_every=3,
        rows=EVICTING, keep_deltas=99,
    )  # fmt: skip
    train(LocalTransport(), config, folder / "run", 48)
    return folder / "run"


@pytest.fixture
def states(run, tmp_path):
    """(folder of deltas, those that have not come yet, in order)."""
    deltas, later = tmp_path / "run" / "deltas", tmp_path / "later"
    shutil.copytree(run / "deltas", deltas)
    later.mkdir()
    for number, _ in list_states(run)[1:]:
        (deltas / f"{number:08d}").rename(later / f"{number:08d}")
    return deltas, sorted(later.iterdir())


def come(deltas: Path, state: Path) -> None:
    state.rename(deltas / state.name)


def await_version(server: Serving, number: int) -> dict:
    wait_for(lambda: server.get("/healthz")["version"]["number"] == number)
    return server.get("/healthz")


def expect(deltas: Path, histories: list) -> list:
    """What the newest version recommends, by `freescale.Subscriber`."""
    found = Subscriber(deltas).load().recommend(histories, k=8)
    return [list(zip(*of)) for of in zip(found.items, found.scores)]


def pairs(answer: dict) -> list:
    return [(one["id"], one["score"]) for one in answer["items"]]


def agree(found: list, expected: list) -> bool:
    """The same items, with the same scores up to the order in which a batch is added."""
    return [i for i, _ in found] == [i for i, _ in expected] and all(
        abs(a - b) < 1e-4 for (_, a), (_, b) in zip(found, expected)
    )


def test_each_answer_is_of_the_version_that_it_names(states):
    """While versions come, from several clients at a time; of a history and of a kept user."""
    deltas, later = states
    body = {"history": HISTORY, "k": 8}
    expected, seen, stop = {0: expect(deltas, [HISTORY])[0]}, [], Event()

    def ask(port: int, user: bool) -> None:
        client = Serving(None, port)
        while not stop.is_set():
            given = {"user": "me", "k": 8} if user else body
            seen.append((user, client.post("/recommend", **given)))

    with serving(deltas.parent, "--follow", "--no-access-log") as server:
        assert server.post("/events", user="me", events=HISTORY)["version"] == 0
        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(ask, server.port, number % 2 == 1) for number in range(4)]
            try:
                for number, state in enumerate(later, 1):
                    come(deltas, state)
                    await_version(server, number)
                    expected[number] = expect(deltas, [HISTORY])[0]
                    count = len(seen)
                    wait_for(lambda count=count: len(seen) > count + 8)
            finally:
                stop.set()
            for each in asking:
                each.result()
        assert server.measure("freescale_swaps") == len(later)
        assert server.measure("freescale_build_seconds") > 0
        assert {answer["version"] for _, answer in seen} == set(range(len(later) + 1))
        wrong = [(u, a) for u, a in seen if not agree(pairs(a), expected[a["version"]])]
        assert wrong == []
        assert len({json.dumps(each) for each in expected.values()}) > 3, "versions do not differ"
        result = server.terminate()
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_a_user_is_rebuilt_for_items_that_come(states):
    """An item that no version knew when its event came counts as soon as one does."""
    deltas, later = states
    known = set(Subscriber(deltas).load().items.ids.to_pylist())
    for state in later:
        come(deltas, state)
    last = Subscriber(deltas).load()
    new = sorted(set(last.items.ids.to_pylist()) - known)
    assert new, "no item has come"
    for state in later:
        (deltas / state.name).rename(state)
    history = [[new[0], START + 5 * 86_400, 1]]
    with serving(deltas.parent, "--follow", "--no-access-log") as server:
        before = server.post("/events", user="me", events=history[:1])
        assert before["version"] == 0 and before["events"] == 1
        server.post("/recommend", user="me", k=8)
        for state in later:
            come(deltas, state)
        await_version(server, len(later))
        found = server.post("/recommend", user="me", k=8)
        assert agree(pairs(found), expect(deltas, [history])[0])
        server.post("/events", user="me", events=HISTORY)  # its rows are of this version
        found = server.post("/recommend", user="me", k=8)
        assert agree(pairs(found), expect(deltas, [history + HISTORY])[0])


def test_a_damaged_delta_leaves_the_old_version(states, tmp_path):
    deltas, later = states
    with serving(deltas.parent, "--follow", "--no-access-log", "--approximate") as server:
        assert server.get("/healthz")["status"] == "ok"
        good = shutil.copytree(later[0], tmp_path / "good")
        data = bytearray((later[0] / "dense.safetensors").read_bytes())
        data[-1] ^= 1
        (later[0] / "dense.safetensors").write_bytes(data)
        come(deltas, later[0])
        wait_for(lambda: server.get("/healthz")["status"] == "stale")
        found = server.get("/healthz")
        assert "00000001" in found["alarm"] and found["version"]["number"] == 0
        assert server.measure("freescale_delta_alarm") == 1
        answer = server.post("/recommend", history=HISTORY, k=8)
        assert answer["version"] == 0 and len(answer["items"]) == 8
        come(deltas, later[1])  # does not help: the one before is damaged
        shutil.rmtree(deltas / later[0].name)
        wait_for(lambda: "missing" in server.get("/healthz")["alarm"])
        good.rename(deltas / later[0].name)
        assert await_version(server, 2)
        wait_for(lambda: server.get("/healthz")["status"] == "ok")
        assert server.measure("freescale_delta_alarm") == 0
        assert server.post("/recommend", history=HISTORY, k=8)["version"] == 2


def test_users_of_the_run_that_is_followed(tmp_path):
    """Their events are those of the windows, with what was posted since."""
    parts = streams.split(streams.add_features(streams.make_events()), 6)
    for name, part in parts[:5]:
        streams.move(tmp_path / "in", name, part)
    given = {"features": "channel=categorical", "deltas": "window", "new_values": 50}
    config = streams.configure(tmp_path / "in", tmp_path / "cache", **given)
    streams.train_alone(config, tmp_path / "run")

    rows = pa.concat_tables(part for _, part in parts).to_pylist()
    new = {row["channel"] for row in rows[500:]} - {row["channel"] for row in rows[:500]}

    def read(user: str) -> list[dict]:
        (*_, last) = streams.read_windows(tmp_path / "run" / "stream")
        mine = [r for r in rows if r["user_id"] == user and r["timestamp"] < last["to"]]
        names = {"item": "item_id", "time": "timestamp", "action": "action", "channel": "channel"}
        return [{name: r[column] for name, column in names.items()} for r in mine]

    deltas = tmp_path / "run" / "deltas"
    with serving(tmp_path / "run", "--follow", "--no-access-log") as server:
        first = read("u3")
        assert agree(pairs(server.post("/recommend", user="u3", k=8)), expect(deltas, [first])[0])
        event = {"item": "i3", "time": first[-1]["time"] + 60, "action": 1, "channel": "c1"}
        server.post("/events", user="u3", events=[event])
        found = server.post("/recommend", user="u3", k=8)
        assert agree(pairs(found), expect(deltas, [[*first, event]])[0])
        streams.move(tmp_path / "in", *parts[5])
        streams.train_alone(config, tmp_path / "run", resume=True)
        last = Subscriber(deltas)
        await_version(server, last.number)
        last.write(tmp_path / "written")
        whole = export(tmp_path / "run", tmp_path / "export", last.last.step)
        assert find_differences(read_export(tmp_path / "written"), whole) == []
        other = next(row["user_id"] for row in rows[500:] if row["channel"] in new)
        second = read(other)
        assert new & {row["channel"] for row in second}  # values that came since
        assert agree(pairs(server.post("/recommend", user=other, k=8)), expect(deltas, [second])[0])
        found = server.post("/recommend", user="u3", k=8)  # what the server keeps
        assert agree(pairs(found), expect(deltas, [[*first, event]])[0])
        found = server.post("/recommend", history=second, k=8)
        assert agree(pairs(found), expect(deltas, [second])[0])
        server.refuse("/recommend", {"user": "nobody"}, 404)


def test_a_run_that_has_published_nothing(tmp_path):
    from helpers.command import freescale

    found = freescale("serve", tmp_path, "--follow", "--port", 0)
    assert found.returncode != 0
    assert "train with --deltas" in found.stderr
