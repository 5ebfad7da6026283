"""Opens the stream of a run, by its settings."""

from __future__ import annotations

from pathlib import Path

from freescale.config.data import DataConfig
from freescale.data.stream.folder import FolderSource
from freescale.data.stream.parsing import Parser
from freescale.data.stream.source import Source
from freescale.data.stream.stream import Stream
from freescale.data.stream.windows import WindowRule

# Settings that decide what windows hold: they stay as they are while a run goes on.
_FIXED = ("columns", "missing", "window", "lateness", "late", "event_id", "event_id_windows")


def open_stream(data: DataConfig, labels: str, folder: Path) -> Stream:
    """Opens or begins the stream in a folder.

    Raises:
        ValueError: there is no such source, or the folder has a stream with other settings.
    """
    assert data.follow is not None
    parser = Parser(data, labels)
    rule = WindowRule(0, drops=data.late == "drop")
    rule.oldest = data.event_id_windows if data.event_id else None
    about = {name: getattr(data, name) for name in _FIXED} | {"labels": labels}
    return Stream(
        folder,
        _open_source(data, parser),
        parser,
        rule,
        (data.window_length, data.lateness_length),
        about,
        data.event_id_windows,
        data.idle_partition,
    )


def _open_source(data: DataConfig, parser: Parser) -> Source:
    assert data.follow is not None
    if data.follow.startswith("kafka://"):
        from freescale.data.stream.kafka import KafkaSource

        return KafkaSource(data.follow, parser, data.avro_schema)
    if "://" in data.follow:
        raise ValueError(f"--follow {data.follow}: name a folder, or kafka://BROKERS/TOPIC")
    return FolderSource(data.follow, parser)
