"""Streams from Kafka: librdkafka's own mock of a cluster, in this process."""

from __future__ import annotations

import io
import json
import time

import fastavro
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from helpers.streams import (
    FEATURES,
    add_features,
    describe_windows,
    make_events,
    open_one,
    read_store,
    read_windows,
)

SCHEMA = {
    "type": "record",
    "name": "event",
    "fields": [
        {"name": "user_id", "type": "string"},
        {"name": "item_id", "type": "string"},
        {"name": "timestamp", "type": "long"},
        {"name": "action", "type": "int"},
        {"name": "event", "type": ["null", "string"]},
    ],
}
TEXTS = "first/vocabulary.parquet"  # of a stream
PARTITIONS = 4  # of a topic of the mock


@pytest.fixture(scope="module")
def cluster():
    producer = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    broker = next(iter(producer.list_topics(timeout=20).brokers.values()))
    return producer, f"{broker.host}:{broker.port}"


def send(producer, topic, events, encode=lambda event: json.dumps(event).encode(), first=0):
    for number, event in enumerate(events, first):
        producer.produce(topic, encode(event), partition=number % PARTITIONS)
    assert producer.flush(20) == 0


def read_until(stream, count):
    end = time.monotonic() + 60
    while stream.count < count:
        stream.advance(0.1)
        assert time.monotonic() < end


def test_a_topic_becomes_windows_across_restarts(cluster, tmp_path):
    """Every event once, whenever the reader was killed, and whatever came twice."""
    producer, address = cluster
    events = add_features(make_events()).to_pylist()
    for number, event in enumerate(events):
        del event["channel" if event["channel"] is None else "price"]  # JSON leaves fields out
        event |= {"note": "last"} if number > 500 else {}
    send(producer, "once", events)
    url = f"kafka://{address}/once"
    options = {"event_id": "event", "features": f"{FEATURES},note=categorical"}
    calm = open_one(tmp_path / "calm", url, **options)
    read_until(calm, 11)
    calm.close()
    windows = read_windows(tmp_path / "calm")
    assert sum(window["events"] for window in windows) == sum(
        event["timestamp"] < windows[-1]["to"] for event in events
    )
    assert set(windows[0]["partitions"]) == {"0", "1", "2", "3"}
    url = f"kafka://{address}/pieces"
    for first in range(0, 600, 200):
        part = events[first : first + 200]
        send(producer, "pieces", part)
        send(producer, "pieces", part[:13])  # a producer that tries again
        stream = open_one(tmp_path / "s", url, **options)
        over = max(0, part[-1]["timestamp"] // 3600 - events[0]["timestamp"] // 3600 - 1)
        read_until(stream, over)
        del stream  # killed: what was read behind the last manifest is read again
    stream = open_one(tmp_path / "s", url, **options)
    read_until(stream, 11)
    columns = "event_id", "category.channel", "category.note"
    assert read_store(tmp_path / "s", *columns) == read_store(tmp_path / "calm", *columns)
    texts = [pq.read_table(tmp_path / each / TEXTS).to_pydict() for each in ("s", "calm")]
    assert texts[0] == texts[1] and "last" in texts[0]["text"]
    found, expected = (describe_windows(read_windows(tmp_path / e)) for e in ("s", "calm"))
    assert found == expected
    stream.close()


def test_values_of_avro(cluster, tmp_path):
    """Plain, and as a schema registry's serializer writes them."""
    producer, address = cluster
    (tmp_path / "event.avsc").write_text(json.dumps(SCHEMA))
    events, schema, found = make_events(200, 5).to_pylist(), fastavro.parse_schema(SCHEMA), {}

    def encode(event, before=b""):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, event)
        return before + out.getvalue()

    for topic, before in (("plain", b""), ("registry", b"\0\0\0\0\x07")):
        send(producer, topic, events, lambda event, before=before: encode(event, before))
        stream = open_one(
            tmp_path / topic, f"kafka://{address}/{topic}", avro_schema=str(tmp_path / "event.avsc")
        )
        read_until(stream, 4)
        found[topic] = describe_windows(read_windows(tmp_path / topic))
        stream.close()
    assert found["plain"] == found["registry"] and len(found["plain"]) >= 4


def test_an_empty_partition_holds_up_the_others_unless_it_is_idle(cluster, tmp_path):
    producer, address = cluster

    def produce(since):
        for event in make_events(100, 4).to_pylist():
            event["timestamp"] += since
            producer.produce("uneven", json.dumps(event).encode(), partition=1)
        producer.flush(20)

    produce(0)
    stream = open_one(tmp_path / "s", f"kafka://{address}/uneven")
    for _ in range(8):
        assert not stream.advance(0.1)
    stream.close()
    stream = open_one(tmp_path / "s", f"kafka://{address}/uneven", idle_partition=0.3)
    read_until(stream, 3)
    produce(4 * 3600)  # of a partition that was held because it was ahead
    read_until(stream, 7)
    stream.close()


def test_a_value_that_is_no_event_is_named(cluster, tmp_path):
    producer, address = cluster
    send(producer, "bad", [*make_events(3).to_pylist(), {"user_id": "u", "item_id": "i"}])
    stream = open_one(tmp_path / "s", f"kafka://{address}/bad")
    with pytest.raises(ValueError, match="bad, partition 3, offsets 0 to 0"):
        read_until(stream, 1)
    stream.close()
