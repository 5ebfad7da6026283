"""`freescale serve`: answers are the Recommender's; what is hostile is refused; load is bounded."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
from click.testing import CliRunner
from freescale_bench.recommend.hostile import make_request
from helpers.browser import browser
from helpers.command import freescale, wait_for
from helpers.serving import Serving, serving
from helpers.small_runs import SMALL, interactions
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import freescale as library
from freescale.cli.main import main

ITEMS, DAY = 40, 86_400


def write_data(folder: Path) -> list[object]:
    random = np.random.default_rng(0)
    sales = {
        "customer": [f"c{user:02d}" for user in random.integers(0, 30, 500)],
        "sku": [f"s{item:02d}" for item in random.integers(0, ITEMS, 500)],
        "timestamp": 1_700_000_000 + DAY * np.arange(500),
        "channel": random.choice(["web", "shop"], 500),
        "device": random.choice(["phone", "desk"], 500),
    }
    catalogue = {
        "sku": [f"s{item:02d}" for item in range(ITEMS)],
        "category": [f"k{item % 4}" for item in range(ITEMS)],
    }
    people = {"customer": [f"c{n:02d}" for n in range(30)], "age": random.integers(18, 80, 30)}
    for name, columns in (("sales", sales), ("items", catalogue), ("users", people)):
        pyarrow.csv.write_csv(pa.table(columns), folder / f"{name}.csv")
    files = [folder / f"{name}.csv" for name in ("sales", "items", "users")]
    features = "category,age,channel,context.device"
    return ["--data", files[0], "--items", files[1], "--users", files[2], "--features", features]


def train(folder: Path, *options: object) -> Path:
    places = ["--folder", folder / "run", "--cache", folder / "cache"]
    done = freescale("train", *options, *places, *SMALL, "--epochs", 1)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    return train(folder, *write_data(folder))


@pytest.fixture(scope="module")
def recommender(run):
    return library.load(run)


@pytest.fixture(scope="module")
def server(run):
    with serving(run, "--max-body", "100kB", "--max-history", 300) as started:
        yield started


def make_history(seed: int, events: int = 8) -> list[dict[str, object]]:
    random = np.random.default_rng(seed)
    items, channels = random.integers(0, ITEMS, events), random.choice(["web", "shop"], events)
    return [
        {"sku": f"s{item:02d}", "timestamp": 1_750_000_000 + DAY * n, "channel": channel}
        for n, (item, channel) in enumerate(zip(items, channels.tolist()))
    ]


def compare(answer: dict, found, place: int = 0) -> None:
    assert [one["id"] for one in answer["items"]] == found.items[place]
    scores, wanted = ([one["score"] for one in answer["items"]], found.scores[place])
    if None in wanted:
        assert scores == wanted
    else:
        np.testing.assert_allclose(scores, wanted, atol=1e-5)


def test_recommends_as_the_recommender(server, recommender):
    history, about, context = make_history(1), {"age": 30}, {"device": "phone"}
    given = {"attributes": [about], "context": [context]}
    for k, exclude_seen in ((1, False), (7, True), (1000, True)):
        more = {"k": k, "exclude_seen": exclude_seen}
        found = recommender.recommend([history], **more, **given)
        answer = server.post(
            "/recommend", history=history, attributes=about, context=context, **more
        )
        compare(answer, found)
    some = [f"s{n:02d}" for n in range(9)]
    found = recommender.recommend([history], 5, candidates=some)
    compare(server.post("/recommend", history=history, k=5, candidates=some), found)
    answer = server.post("/recommend", history=history, filter=["category=k1|k2"], describe=True)
    assert {one["attributes"]["category"][0] for one in answer["items"]} == {"k1", "k2"}
    compare(server.post("/recommend", user="c03", k=4), recommender.recommend(users=["c03"], k=4))
    compare(server.post("/recommend", history=[], k=4), recommender.recommend([[]], 4))
    assert (
        server.post("/recommend", history=[*history, {"sku": "new", "timestamp": 1}])["unknown"]
        == 1
    )


def test_requests_of_one_body_and_of_one_batch_do_not_mix(server, recommender):
    histories = [make_history(seed, 3 + seed) for seed in range(6)]
    bodies = [
        {"history": history, "k": 2 + 3 * n, "exclude_seen": n % 2 == 0}
        for n, history in enumerate(histories)
    ]
    bodies.append({"history": histories[0], "candidates": ["s01", "s02"]})
    answers = server.post("/recommend", requests=bodies)["results"]
    for body, answer in zip(bodies, answers, strict=True):
        one = {name: value for name, value in body.items() if name != "history"}
        compare(answer, recommender.recommend([body["history"]], **one))


def test_scores_as_the_recommender(server, recommender):
    history, items = make_history(2), ["s01", "s05", "never"]
    (scores,) = recommender.score([history], items)
    answer = server.post("/score", history=history, candidates=items)["items"]
    assert [one["id"] for one in answer] == items and answer[2]["score"] is None
    np.testing.assert_allclose([one["score"] for one in answer[:2]], scores[:2], atol=1e-5)


def test_events_count_at_once(server, recommender):
    history = make_history(3)
    for first, last in ((0, 5), (6, 8), (5, 6)):  # one event is late
        answer = server.post("/events", user="new one", events=history[first:last])
    assert answer == {"user": "new one", "events": 8, "unknown": 0}
    wanted = recommender.recommend([history], exclude_seen=True)
    compare(server.post("/recommend", user="new one", exclude_seen=True), wanted)
    # a user of the run: after the events of the data
    before = server.post("/recommend", user="c04", k=1000, exclude_seen=True)["items"]
    best = before[0]["id"]
    event = {"sku": best, "timestamp": 1_790_000_000, "channel": "web"}
    server.post("/events", user="c04", events=[event])
    after = server.post("/recommend", user="c04", k=1000, exclude_seen=True)["items"]
    assert {one["id"] for one in after} == {one["id"] for one in before} - {best}
    assert server.measure("freescale_users") >= 2 and server.measure("freescale_user_bytes") > 0


EVENT = {"sku": "s01", "timestamp": 1_750_000_000}
WRONG = {
    "user": (
        {"k": 3}, {"user": "c01", "history": []}, {"user": {}}, {"user": "x" * 300}, {"user": 1.5},
    ),
    "k": ({"history": [], "k": 0}, {"history": [], "k": 1001}, {"history": [], "k": "3"}),
    "history": (
        {"history": [["s01"]]}, {"history": [EVENT] * 301}, {"history": {}},
        {"history": [{"sku": "s01", "timestamp": 2**62}]},
        {"history": [{"sku": "s01", "timestamp": "yesterday"}]}, {"history": [{"timestamp": 3}]},
        {"history": [{}]},
    ),
    "history[1]": ({"history": [EVENT, []]}, {"history": [EVENT, None]}, {"history": [3, [1] * 4]}),
    "history[0].sku": ({"history": [{"sku": {}}]},),
    "candidates": ({"history": [], "candidates": []}, {"history": [], "candidates": ["never"]}),
    "candidates[1]": ({"history": [], "candidates": ["s01", 1.5]},),
    "filter": ({"history": [], "filter": ["colour=red"]}, {"history": [], "filter": ["category"]}),
    "wrong": ({"history": [], "wrong": 1},),
    "requests": ({"requests": []}, {"requests": [{"history": []}] * 65}, {"requests": 3}),
    "requests[1].k": ({"requests": [{"history": []}, {"history": [], "k": -1}]},),
    "requests[1].history": ({"requests": [{"history": []}, {"history": [["s01"]]}]},),
    "body": (
        b"", b"{", b"[]", b"3", b"null", b"\xff", b'{"user":"a","user":"b"}', b'{"user":"\\ud800"}',
        b'{"history":[NaN]}', b'{"k":1e999}', b'{"k":-Infinity}', b'{"k":' + b"9" * 5000 + b"}",
        b'{"k":9223372036854775808}', b"[" * 90_000, b'{"a":' * 15_000, "{}".encode("utf-16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_body_names_its_field(server, field):
    for body in WRONG[field]:
        found = server.refuse("/recommend", body)
        assert found["field"] == field, (body, found)
    assert server.get("/healthz") == {"status": "ok"}


def test_other_refusals(server):
    assert server.refuse("/recommend", {"user": "nobody"}, 404)["field"] == "user"
    assert server.refuse("/score", {"history": []})["field"] == "candidates"
    assert server.refuse("/events", {"user": "a"})["field"] == "events"
    assert server.send("GET", "/recommend")[0] == 405 and server.send("GET", "/never")[0] == 404


def exchange(server: Serving, *parts: bytes) -> bytes:
    """What the server answers to bytes, until it closes or the sender has no more."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while more := connection.recv(1 << 16):
            found += more
        return found


def test_bodies_that_do_not_hold_what_they_promise(server):
    head = b"POST /recommend HTTP/1.1\r\nhost: a\r\n"
    large = b"%x\r\n%s\r\n" % (60_000, b" " * 60_000)
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    assert b" 413 " in exchange(server, chunked, large, large)
    assert b" 413 " in exchange(server, head + b"content-length: 100001\r\n\r\n")
    assert b" 413 " in exchange(server, head + b"content-length: 9999999999999999999\r\n\r\n")
    assert b" 400 " in exchange(server, head + b"content-length: -1\r\n\r\n")
    both = b'content-length: 2\r\n\r\n{}{"user":"c01"}'  # what follows is no request
    assert b" 400 " in exchange(server, head + both)
    with suppress(ConnectionError):  # closed while more is sent
        line = b"a: %s\r\n" % (b"b" * 9000)
        assert b" 400 " in exchange(server, b"GET / HTTP/1.1\r\n", *[line] * 40)
    host = b"POST /recommend HTTP/1.1\r\nhost: a/b?c#d\r\ncontent-length: 2\r\n\r\n{}"
    assert b" 400 " in exchange(server, host)
    exchange(server, head + b'content-length: 50\r\n\r\n{"user":')  # ends early
    assert server.get("/healthz") == {"status": "ok"}


@settings(max_examples=150)
@given(st.integers(0, 1 << 32))
def test_nothing_makes_it_fail(server, seed):
    path, body = make_request(Random(seed))
    status, answer = server.send("POST", path, body)
    assert status in (200, 400, 404, 413), answer
    assert json.loads(answer, parse_constant=pytest.fail) and b"Traceback" not in answer


def test_it_has_not_failed(server):
    errors = server.process.read_output(1)
    assert "Traceback" not in errors
    lines = [json.loads(line) for line in errors.splitlines()]
    assert {"time", "client", "method", "path", "status", "ms"} == set(lines[0])


def test_metrics(server):
    families = {one.name: one for one in text_string_to_metric_families(server.get("/metrics"))}
    counted = {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for sample in families["freescale_requests"].samples
        if sample.name.endswith("_total")
    }
    server.post("/recommend", history=[])
    name = 'freescale_requests_total{path="/recommend",status="200"}'
    assert server.measure(name) == counted["/recommend", "200"] + 1
    assert server.measure("freescale_queue_length") == 0
    assert {"freescale_request_seconds", "freescale_batch_size"} <= set(families)


def test_the_api_is_described(server):
    paths = server.get("/openapi.json")["paths"]
    options = paths["/recommend"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert options["oneOf"][0]["properties"]["history"]["maxItems"] == 300
    page = server.get("/docs")
    assert all(path in page for path in paths) and "://" not in page


def test_a_token(run):
    with serving(run, "--no-access-log", FREESCALE_TOKEN="secret") as server:
        assert server.get("/healthz") == {"status": "ok"} and "Try" in server.get("/")
        for wrong in ({}, {"authorization": "secret"}, {"authorization": "Bearer secre"}):
            for method, path in (("GET", "/metrics"), ("POST", "/recommend"), ("GET", "/users")):
                status, answer = server.send(method, path, b"", **wrong)
                assert (status, json.loads(answer)["error"]["field"]) == (401, "authorization")
        assert server.get("/users", authorization="Bearer secret")["users"]
        done = server.terminate()
        assert done.returncode == 0 and done.stderr == ""


def test_a_full_queue_refuses_and_a_signal_drains(run, recommender):
    """Requests wait a minute for others to share a batch, so that two of them fill the queue."""
    history, answers = make_history(5), {}
    with serving(run, "--queue", 2, "--wait", 60_000) as server:

        def ask(number: int) -> None:
            one = Serving(server.process, server.port)
            answers[number] = one.post("/recommend", history=history)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.measure("freescale_queue_length") == 2)
        for body in (b'{"history":[]}', b"no JSON"):  # it is not read
            assert server.refuse("/recommend", body, 503)["field"] == "queue"
            assert server.headers["retry-after"] == "1"
        assert server.measure("freescale_rejected_total") == 2
        done = server.terminate()
        for thread in threads:
            thread.join()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for number in range(2):
        compare(answers[number], recommender.recommend([history]))


def test_it_ends_when_its_model_does(run):
    with serving(run) as server:
        (model,) = server.process.ranks()
        os.kill(model, signal.SIGKILL)
        done = server.process.ended()
    assert done.returncode == 1 and "the process of the model ended with -9" in done.stderr


def test_an_export_forgets_the_oldest_users(run, tmp_path):
    done = freescale("export", run, "--out", tmp_path / "export")
    assert done.returncode == 0, done.stderr
    with serving(tmp_path / "export", "--memory", "5kB", "--keep-events", 3) as server:
        for n in range(9):
            server.post("/events", user=f"u{n}", events=make_history(n, 9))
        assert server.measure("freescale_users") + server.measure("freescale_users_dropped") == 9
        assert server.measure("freescale_user_bytes") <= 5000
        assert server.refuse("/recommend", {"user": "u0"}, 404)["field"] == "user"
        server.post("/recommend", user="u8")
        kept = server.post("/events", user="u8", events=make_history(9, 60))
        assert kept["events"] == 20 + 3  # of the 20 that the model reads, and for exclude_seen
        assert server.get("/users?q=u8")["users"] == ["u8"]


def test_a_ranking_model_scores(tmp_path):
    clicks = np.random.default_rng(0).integers(0, 2, 480)
    data = interactions(tmp_path / "events.parquet", is_click=clicks)
    options = ["--data", data, "--task", "ranking", "--labels", "is_click", "--candidates", 1]
    run = train(tmp_path, *options)
    model, history = library.load(run), [[3, 10], [4, 20]]
    with serving(run) as server:
        answer = server.post("/score", history=history, candidates=[5, 6], at=30)["items"]
        (scores,) = model.score([history], [5, 6], at=[30])
        np.testing.assert_allclose([one["score"] for one in answer], scores, atol=1e-5)
        found = server.refuse("/recommend", {"history": history})
        assert "/score" in found["fix"]


def test_errors_of_the_command(run, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = CliRunner().invoke(
            main, ["serve", str(run), "--port", str(other.getsockname()[1])]
        )
    assert result.exit_code == 1 and "--port" in result.output
    for name in [name for name in sys.modules if name.startswith("freescale.recommend.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(main, ["serve", str(run)])
    assert result.exit_code == 1 and "freescale[serve]" in result.output


@pytest.mark.parametrize("dark", (False, True))
def test_the_page(server, tmp_path, dark):
    with browser(tmp_path, dark=dark) as window:
        window.open_address(f"http://127.0.0.1:{server.port}/")
        assert window.run("return getComputedStyle(document.body).colorScheme") == "light dark"
        assert window.run(
            "return [...document.querySelectorAll('input')].every((i) => i.labels[0])"
        )
        for item in ("s01", "s07"):
            window.keys("#item", item)
            window.click("#add")
        window.click("form fieldset:last-of-type button")
        rows = "return [...document.querySelectorAll('tbody tr')].map((r) => r.innerText)"
        wait_for(lambda: len(window.run(rows)) == 10)
        assert all(
            re.search(r"s\d\d\s+-?\d\.\d{4}\s+category: k\d", row) for row in window.run(rows)
        )
        window.keys("#user", "c0")
        options = "return [...document.querySelectorAll('#users option')].map((o) => o.value)"
        wait_for(lambda: "c03" in window.run(options))
        window.keys("#user", "9")
        window.click("form fieldset:last-of-type button")
        wait_for(lambda: window.run("return document.querySelectorAll('tbody tr').length") == 10)
        window.keys("#user", "nobody")
        window.click("form fieldset:last-of-type button")
        status = "return document.getElementById('status').textContent"
        wait_for(lambda: "no events" in window.run(status))
        assert [line for line in window.log() if "404" not in line] == []
        window.picture(tmp_path / "page.png")


def test_approximate_search(run, tmp_path):
    """With the index of an export; without one the server does not start."""
    done = freescale("serve", run, "--port", 0, "--approximate")
    assert done.returncode == 1 and "has no index for approximate search" in done.stderr
    done = freescale("export", run, "--out", tmp_path / "out", "--index", "--min-recall", 0.5)
    assert done.returncode == 0, done.stderr
    found = library.load(tmp_path / "out")
    history = [["s01", 1_700_000_000], ["s02", 1_700_000_100]]
    near = found.recommend([[tuple(event) for event in history]], k=5, approximate=True)
    with serving(tmp_path / "out", "--approximate") as server:
        items = server.post("/recommend", history=history, k=5)["items"]
        assert [item["id"] for item in items] == near.items[0]
        some = server.post("/recommend", history=history, candidates=["s03"])["items"]
        assert [item["id"] for item in some] == ["s03"]
