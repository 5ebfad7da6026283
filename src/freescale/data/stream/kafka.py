"""A Kafka topic. Offsets come from the manifests: the consumer group has none, and none is
committed."""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from freescale.data.ingest.sources import SourceFile
from freescale.data.stream.parsing import Parser
from freescale.data.stream.source import Chunk, Source

_MESSAGES = 20_000  # messages that are read at a time
_METADATA_S = 10.0  # timeout of an answer of a broker
_LOOK_EVERY_S = 30.0  # interval of looking for further partitions


class KafkaSource(Source):
    """The partitions of a topic, read from their beginnings.

    `kafka://BROKER:PORT,BROKER:PORT/TOPIC?security.protocol=SSL`: what follows the question mark
    are settings of librdkafka. A value is a JSON object or, with `avro`, a record of Avro; its
    fields are the columns.
    """

    def __init__(self, url: str, parser: Parser, avro: str | None) -> None:
        """`avro`: path of the schema."""
        try:
            import confluent_kafka
        except ImportError:
            raise ValueError(
                f"--follow {url} needs confluent-kafka: pip install 'freescale[kafka]'"
            ) from None
        parts = urlsplit(url)
        self.name, self._parser, self._kafka = url, parser, confluent_kafka
        self._topic = parts.path.strip("/")
        if not parts.netloc or not self._topic:
            raise ValueError(f"--follow {url}: write kafka://BROKER:PORT/TOPIC")
        self._decode = _make_avro_decoder(avro) if avro else None
        self._offsets: dict[int, int] = {}  # the next ones, by partition
        self._assigned: set[int] = set()
        self._looked = -_LOOK_EVERY_S
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": parts.netloc,
                "group.id": "freescale",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",  # offsets that are gone: never skip events
                "enable.partition.eof": False,
                "queued.max.messages.kbytes": 65_536,
                **dict(parse_qsl(parts.query)),
            }
        )

    @property
    def clocks(self) -> list[str]:
        return [str(number) for number in sorted(self._assigned)]

    def rank(self, partition: str) -> int:
        return int(partition)

    def poll(self, seconds: float) -> Sequence[Chunk]:
        self._find_partitions()
        messages = self._consumer.consume(_MESSAGES, seconds)
        by_partition: dict[int, list[Any]] = {}
        for message in messages:
            if (error := message.error()) is not None:
                self._raise_lasting(error)
                continue
            number, offset = int(message.partition()), int(message.offset())  # type: ignore[arg-type]
            if offset < self._offsets[number]:
                self.repeated += 1
                continue
            self._offsets[number] = offset + 1
            if message.value():  # not a tombstone
                by_partition.setdefault(number, []).append(message)
        chunks = (self._make_chunk(n, by_partition[n]) for n in sorted(by_partition))
        return [chunk for chunk in chunks if chunk is not None]

    def _find_partitions(self) -> None:
        """Assigns the partitions of the topic; again now and then, for new ones."""
        if time.monotonic() - self._looked < _LOOK_EVERY_S:
            return
        try:
            topic = self._consumer.list_topics(self._topic, _METADATA_S).topics[self._topic]
        except self._kafka.KafkaException:  # the brokers are gone, for a while
            return
        if topic.error is not None or not topic.partitions:
            return
        self._looked = time.monotonic()
        new = sorted(topic.partitions.keys() - self._assigned)
        if new:
            places = [
                self._kafka.TopicPartition(
                    self._topic, n, self._offsets.setdefault(n, self._find_first(n))
                )
                for n in new
            ]
            self._consumer.incremental_assign(places)
            self._assigned |= set(new)

    def _find_first(self, number: int) -> int:
        place = self._kafka.TopicPartition(self._topic, number)
        low, _ = self._consumer.get_watermark_offsets(place, _METADATA_S)
        return int(low)

    def _raise_lasting(self, error: Any) -> None:
        """Raises ValueError unless the error may pass by itself."""
        if error.code() == self._kafka.KafkaError._AUTO_OFFSET_RESET:
            raise ValueError(
                f"{self.name}: events behind the last manifest are gone from the topic "
                f"({error.str()}): keep them longer than a run may be down"
            )
        if error.fatal():
            raise ValueError(f"{self.name}: {error.str()}")

    def _make_chunk(self, number: int, messages: Sequence[Any]) -> Chunk | None:
        first, last = messages[0].offset(), messages[-1].offset()
        values = [message.value() for message in messages]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ("events.jsonl" if self._decode is None else "events.parquet")
            shown = f"{self.name}, partition {number}, offsets {first} to {last}"
            try:
                if self._decode is None:
                    lines = [value.replace(b"\n", b" ") for value in values]
                    if features := self._parser.features:
                        names = dict.fromkeys(name.partition(".")[2] for name in features)
                        with suppress(ValueError, TypeError):  # the reader says what is wrong
                            lines[0] = json.dumps(names | json.loads(lines[0])).encode()
                    path.write_bytes(b"\n".join(lines) + b"\n")
                else:
                    records = [self._decode(value) for value in values]
                    pq.write_table(pa.Table.from_pylist(records), path)
                events = self._parser.parse(SourceFile(path, shown))
            except ValueError as error:
                raise ValueError(str(error).replace(os.fspath(path), shown)) from error
        if events is None:
            return None
        offsets = np.array([message.offset() for message in messages])
        if len(events) != len(offsets):  # --missing drop
            offsets = first + np.arange(len(events))
        arrived = messages[-1].timestamp()[1] / 1000
        return Chunk(str(number), str(number), offsets, events, False, max(0.0, arrived))

    def hold(self, ahead: Sequence[str]) -> None:
        held = [self._kafka.TopicPartition(self._topic, int(clock)) for clock in ahead]
        rest = self._assigned - {int(clock) for clock in ahead}
        self._consumer.resume([self._kafka.TopicPartition(self._topic, n) for n in rest])
        self._consumer.pause(held)

    def position(self) -> dict[str, Any]:
        return {"offsets": {str(number): offset for number, offset in self._offsets.items()}}

    def restore(self, position: Mapping[str, Any]) -> None:
        self._offsets = {int(number): offset for number, offset in position["offsets"].items()}

    def close(self) -> None:
        self._consumer.close()


def _make_avro_decoder(path: str) -> Any:
    """Records of a schema, plain or with the five bytes that registries put before them."""
    try:
        import fastavro
    except ImportError:
        raise ValueError("--avro-schema needs fastavro: pip install 'freescale[kafka]'") from None
    schema = fastavro.parse_schema(json.loads(Path(path).read_text(encoding="utf-8")))

    def decode(value: bytes) -> dict[str, Any]:
        for begin in (0, 5):
            data = io.BytesIO(value[begin:])
            with suppress(EOFError, IndexError, KeyError, UnicodeDecodeError, ValueError):
                found: Any = fastavro.schemaless_reader(data, schema)
                if not data.read(1):
                    return dict(found)
        raise ValueError(f"a value does not fit the schema {path}: {value[:20]!r}")

    return decode
