"""Every reader against small files whose events are known, and every bad file."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data.ingest import tables, text_blocks
from freescale.data.ingest.interactions import read_interactions


def rows(path: Path | list[Path], format: str = "auto") -> list[dict]:
    batches = list(read_interactions(path, format))
    assert all(b.schema.names[:3] == ["user_id", "item_id", "timestamp"] for b in batches)
    assert all(
        b.schema.field(n).type == pa.int64()
        for b in batches
        for n in ("user_id", "item_id", "timestamp")
    )
    return [row for batch in batches for row in batch.to_pylist()]


def event(user: int, item: int, time: int, **more: float) -> dict:
    return {"user_id": user, "item_id": item, "timestamp": time, **more}


def text(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content)
    return path


def table(folder: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), folder / "events.parquet")
    return folder / "events.parquet"


def test_parquet_keeps_numbers_and_drops_text(tmp_path):
    path = tmp_path / "events.parquet"
    columns = {
        "note": ["a", "b"],
        "score": [0.5, 1.5],
        "timestamp": pa.array([7, 9], pa.timestamp("ms")),
        "item_id": pa.array([3, 4], pa.int32()),
        "user_id": pa.array([1, 2], pa.uint64()),
        "liked": [True, False],
        "action": pa.array([5, 6], pa.int16()),
    }
    pq.write_table(pa.table(columns), path)
    expected = [
        event(1, 3, 7, action=5, score=0.5, liked=1),
        event(2, 4, 9, action=6, score=1.5, liked=0),
    ]
    assert rows(path) == expected


def test_parquet_streams(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_ROWS", 10)
    path = table(
        tmp_path, user_id=list(range(25)), item_id=list(range(25)), timestamp=list(range(25))
    )
    batches = list(read_interactions(path))
    assert [b.num_rows for b in batches] == [10, 10, 5]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param(
            "ratings.dat",
            "1::1193::4.5::978300760\n1::661::3::978302109\r\n2::7::0.5::5\n",
            id="double colons",
        ),
        pytest.param(
            "u.data", "1\t1193\t4.5\t978300760\n1\t661\t3\t978302109\n2\t7\t0.5\t5", id="tabs"
        ),
        pytest.param(
            "ratings.csv",
            "userId,movieId,rating,timestamp\n1,1193,4.5,978300760\n1,661,3.0,978302109\n2,7,0.5,5\n",
            id="commas with a header",
        ),
    ],
)
def test_movielens(tmp_path, name, content):
    expected = [
        event(1, 1193, 978300760, action=9),
        event(1, 661, 978302109, action=6),
        event(2, 7, 5, action=1),
    ]
    assert rows(text(tmp_path, name, content)) == expected
    with gzip.open(tmp_path / (name + ".gz"), "wt") as file:
        file.write("\ufeff" * name.endswith("csv") + content)
    assert rows(tmp_path / (name + ".gz")) == expected


@pytest.mark.parametrize("separator", ["|", ";", "\t"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param("userId,movieId,rating,timestamp", id="movielens"),
        pytest.param("user_id,parent_asin,rating,timestamp", id="amazon"),
        pytest.param("user_id,video_id,rating,time_ms", id="kuairand"),
    ],
)
def test_names_of_known_files_with_another_separator(tmp_path, names, separator):
    content = f"{names}\n1,7,4.5,978300760\n2,8,3.0,978302109\n".replace(",", separator)
    expected = [event(1, 7, 978300760, action=9), event(2, 8, 978302109, action=6)]
    assert rows(text(tmp_path, "ratings.csv", content)) == expected


AMAZON = [
    ("A2CX7LUOHB2NDG", "0000013714", 5.0, 100),
    ("AXY", "B00", 2.5, 90),
    ("A2CX7LUOHB2NDG", "B00", 1.0, 80),
]
AMAZON_EVENTS = [event(0, 0, 100, action=10), event(1, 1, 90, action=5), event(0, 1, 80, action=2)]


@pytest.mark.parametrize(
    "header",
    [
        pytest.param("", id="no header"),
        pytest.param("user,item,rating,timestamp\n", id="short names"),
        pytest.param("user_id,parent_asin,rating,timestamp\n", id="names of 2023"),
    ],
)
def test_amazon_csv(tmp_path, header):
    content = header + "".join(",".join(map(str, row)) + "\n" for row in AMAZON)
    assert rows(text(tmp_path, "ratings.csv", content)) == AMAZON_EVENTS


def test_amazon_csv_with_item_first(tmp_path):
    content = "".join(f"{item},{user},{rating},{time}\n" for user, item, rating, time in AMAZON)
    assert rows(text(tmp_path, "Books.csv", content)) == AMAZON_EVENTS


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("reviewerID", "asin", "overall", "unixReviewTime"), id="names of 2018"),
        pytest.param(("user_id", "parent_asin", "rating", "timestamp"), id="names of 2023"),
    ],
)
def test_amazon_json(tmp_path, names):
    lines = [
        json.dumps({**dict(zip(names, row, strict=True)), "text": "a\nb", "helpful": [1, 2]})
        for row in AMAZON
    ]
    path = text(tmp_path, "reviews.jsonl", "\n".join(lines))
    assert rows(path) == AMAZON_EVENTS


def test_codes_go_on_over_blocks_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "_BLOCK", 16)  # less than a line
    content = "".join(",".join(map(str, row)) + "\n" for row in AMAZON)
    first, second = text(tmp_path, "a.csv", content), text(tmp_path, "b.csv", "AXY,NEW,3.0,7\n")
    reader = read_interactions([first, second])
    got = [row for batch in reader for row in batch.to_pylist()]
    assert got == [*AMAZON_EVENTS, event(1, 2, 7, action=6)]
    assert list(reader.vocabulary.columns["item_id"]) == ["0000013714", "B00", "NEW"]
    assert list(reader.vocabulary.columns["user_id"]) == ["A2CX7LUOHB2NDG", "AXY"]
    assert reader.fraction == 1.0


def test_kuairand(tmp_path):
    header = "user_id,video_id,date,time_ms,is_click,is_like,long_view,tab\n"
    content = header + "0,8,20220408,1649,1,0,1,1\n5,2,1,3,0,1,0,2\n"
    assert rows(text(tmp_path, "log_standard.csv", content)) == [
        event(0, 8, 1649, action=1 + 64, is_click=1, is_like=0, long_view=1),
        event(5, 2, 3, action=2, is_click=0, is_like=1, long_view=0),
    ]


def bad_parquet(**columns):
    return lambda folder: table(folder, **columns)


def bad_text(name, content):
    return lambda folder: text(folder, name, content)


NULL = pa.array([None], pa.int64())
FLAGS = "user_id,video_id,time_ms,is_click\n"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(
            lambda folder: folder / "nowhere.parquet",
            ["nowhere.parquet", "no such file"],
            id="no file",
        ),
        pytest.param(bad_text("x.parquet", ""), ["x.parquet", "0 bytes"], id="empty file"),
        pytest.param(
            bad_text("x.parquet", "not parquet at all"),
            ["x.parquet", "not a readable Parquet file"],
            id="not Parquet",
        ),
        pytest.param(
            bad_parquet(user_id=[1], timestamp=[2]),
            ["as item", "'user_id', 'timestamp'", "--columns item=NAME"],
            id="no item column",
        ),
        pytest.param(
            bad_parquet(user_id=[1], item_id=[1.5], timestamp=[2]),
            ["'item_id'", "double", "int64"],
            id="fractional item id",
        ),
        pytest.param(
            bad_parquet(user_id=[1], item_id=NULL, timestamp=[2]),
            ["events.parquet, row 1", "'item_id'", "1 null", "drop"],
            id="null item id",
        ),
        pytest.param(
            bad_parquet(user_id=[1], item_id=[1], timestamp=[2], action=[0.5]),
            ["'action'", "double", "int64"],
            id="fractional action",
        ),
        pytest.param(
            bad_parquet(
                **{n: pa.array([], pa.int64()) for n in ("user_id", "item_id", "timestamp")}
            ),
            ["no events", "events.parquet"],
            id="no events in Parquet",
        ),
        pytest.param(
            bad_text("ratings.csv", "userId,movieId,rating,timestamp\n"),
            ["no events"],
            id="no events in CSV",
        ),
        pytest.param(
            bad_text("ratings.csv", "userId,movieId,rating,timestamp\n1,2,3,3\n1,7,x7,3\n"),
            ["ratings.csv, line 3", "'rating'", "'x7'", "not a number"],
            id="rating is no number in CSV",
        ),
        pytest.param(
            bad_text("ratings.csv", "userId,movieId,rating,timestamp\n1,,3,3\n"),
            ["ratings.csv, line 2", "'movieId'", "1 null"],
            id="empty item id",
        ),
        pytest.param(
            bad_text("ratings.csv", "userId,movieId,rating,timestamp\n1,2,3\n"),
            ["ratings.csv, line 2", "Expected 4 columns, got 3"],
            id="short row",
        ),
        pytest.param(
            bad_text("ratings.dat", "1::2::3\n"),
            ["cannot tell the format", "1::2::3", "--columns"],
            id="three columns in ratings.dat",
        ),
        pytest.param(
            bad_text("ratings.csv", "user_id,item,when,x\na,b,3,4\n"),
            ["as time", "'when'", "--columns time=NAME", "time=order"],
            id="CSV without times",
        ),
        pytest.param(
            bad_text("a.jsonl", '{"reviewerID": "a", "asin": "b", "overall": 5}\n'),
            ["a.jsonl", "as time", "'reviewerID', 'asin', 'overall'"],
            id="JSON without times",
        ),
        pytest.param(
            bad_text("a.jsonl", '{"reviewerID": "a"\n'), ["not a JSON object"], id="broken JSON"
        ),
        pytest.param(
            bad_text(
                "a.jsonl", '{"user_id":"a","asin":"b","rating":5,"timestamp":1}\n{"user_id":"a"}\n'
            ),
            ["a.jsonl, line 2", "'asin'", "1 null"],
            id="second JSON object without an item",
        ),
        pytest.param(
            bad_text("a.jsonl", '{"user_id":"a","asin":"b","rating":"five","timestamp":1}\n'),
            ["a.jsonl", "rating", "fix or drop"],
            id="rating is no number",
        ),
        pytest.param(
            bad_text("log.csv", FLAGS + "1,2,3,2\n"),
            ["log.csv, line 2", "'is_click'", "2, not 0 or 1"],
            id="label is neither 0 nor 1",
        ),
        pytest.param(
            bad_text("log.csv", "a,b\n1,2\n"),
            ["cannot tell the format", "a,b", "kuairand"],
            id="unknown format",
        ),
        pytest.param(
            bad_text("x.csv.gz", "not gzip"), ["x.csv.gz", "broken gzip"], id="broken gzip"
        ),
    ],
)
def test_bad_files_get_one_line(tmp_path, make, words):
    with pytest.raises(ValueError) as error:
        rows(make(tmp_path))
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def stamps(folder: Path, name: str, times: list[int], kind: pa.DataType) -> Path:
    columns = {
        "user_id": [1] * len(times),
        "item_id": list(range(len(times))),
        "timestamp": pa.array(times, kind),
    }
    pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


def test_timestamps_of_several_files_are_in_the_finest_unit(tmp_path):
    fine = stamps(tmp_path, "fine", [5_000_001, 7_000_000], pa.timestamp("us"))
    coarse = stamps(tmp_path, "coarse", [4_000, 6_000, -1], pa.timestamp("ms"))
    expected = {"fine": [5_000_001, 7_000_000], "coarse": [4_000_000, 6_000_000, -1_000]}
    assert [row["timestamp"] for row in rows([fine, coarse])] == [
        *expected["fine"],
        *expected["coarse"],
    ]
    assert [row["timestamp"] for row in rows([coarse, fine])] == [
        *expected["coarse"],
        *expected["fine"],
    ]
    # alone it keeps its own
    assert [row["timestamp"] for row in rows(coarse)] == [4_000, 6_000, -1]
    berlin = stamps(tmp_path, "berlin", [4_000], pa.timestamp("ms", "Europe/Berlin"))
    utc = stamps(tmp_path, "utc", [5_000_000], pa.timestamp("us", "UTC"))
    # zones are shown, values are UTC
    assert [row["timestamp"] for row in rows([berlin, utc])] == [4_000_000, 5_000_000]


def test_text_files_of_two_releases_are_in_one_unit(tmp_path):
    seconds = text(
        tmp_path,
        "old.jsonl",
        ('{"reviewerID": "a", "asin": "x", "overall": 5.0, "unixReviewTime": 1400000000}\n'),
    )
    thousandths = text(
        tmp_path, "new.csv", "user_id,parent_asin,rating,timestamp\na,y,5.0,1500000000123\n"
    )
    assert [row["timestamp"] for row in rows([thousandths, seconds])] == [
        1_500_000_000_123,
        1_400_000_000_000,
    ]
    other = text(tmp_path, "other.csv", "user_id,item_id,rating,timestamp\na,z,5.0,16\n")
    with pytest.raises(
        ValueError,
        match=(
            r"other.csv: .*'timestamp' .* of no known unit, next to "
            r"int64 \(ms\) of .*new.csv"
        ),
    ):
        rows([thousandths, other])


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        pytest.param(
            pa.int64(),
            1,
            [
                "b.parquet: column 'timestamp' holds int64, of no known unit",
                "timestamp[ns, tz=UTC]",
                "a.parquet",
                "cast",
            ],
            id="no unit",
        ),
        pytest.param(
            pa.timestamp("ns"),
            1 << 40,
            ["b.parquet: column 'timestamp' holds timestamp[ns], of no time zone", "a.parquet"],
            id="no time zone",
        ),
        pytest.param(
            pa.timestamp("s", "UTC"),
            1 << 40,
            ["b.parquet: column 'timestamp'", str(1 << 40), "fit int64 in ns"],
            id="beyond int64 in ns",
        ),
    ],
)
def test_timestamps_that_cannot_be_brought_together_are_refused(tmp_path, kind, value, words):
    first = stamps(tmp_path, "a", [1], pa.timestamp("ns", "UTC"))
    second = stamps(tmp_path, "b", [value], kind)
    for paths in ([first, second], [second, first]):
        with pytest.raises(ValueError) as error:
            rows(paths)
        for word in words:
            assert word in str(error.value), error.value


def test_unknown_format_and_mixed_files(tmp_path):
    path = text(tmp_path, "ratings.dat", "1::2::3::4\n")
    with pytest.raises(ValueError, match="unknown format 'xls'.*movielens"):
        read_interactions(path, "xls")
    other = text(tmp_path, "log.csv", FLAGS + "1,2,3,1\n")
    with pytest.raises(ValueError, match="log.csv.*is_click.*differ"):
        rows([path, other])
    with pytest.raises(ValueError, match="no interaction file"):
        read_interactions([])


SECONDS, UNITS = 1_700_000_000, {"ms": 10**3, "us": 10**6, "ns": 10**9}


def as_csv(folder: Path, times: list) -> Path:
    lines = [f"{number % 3},{number},{time}\n" for number, time in enumerate(times)]
    return text(folder, "events.csv", "user_id,item_id,timestamp\n" + "".join(lines))


def as_jsonl(folder: Path, times: list) -> Path:
    events = [event(number % 3, number, time) for number, time in enumerate(times)]
    return text(folder, "events.jsonl", "".join(json.dumps(each) + "\n" for each in events))


def as_parquet(folder: Path, times: list) -> Path:
    numbers = list(range(len(times)))
    kind = pa.float64() if any(isinstance(time, float) for time in times) else pa.int64()
    columns = {"user_id": numbers, "item_id": numbers, "timestamp": pa.array(times, kind)}
    pq.write_table(pa.table(columns), folder / "events.parquet", row_group_size=7)
    return folder / "events.parquet"


@pytest.mark.parametrize("write", [as_csv, as_jsonl, as_parquet])
@pytest.mark.parametrize(
    ("unit", "part"), [("ms", 0), ("us", 0), ("ns", 0), ("ms", 0.25), ("us", 0.25)]
)
def test_times_of_two_units_in_one_column_are_refused(tmp_path, monkeypatch, write, unit, part):
    """Beside each other or in another block, and whichever of them is the rarer one."""
    monkeypatch.setattr(tables, "_ROWS", 10)
    monkeypatch.setattr(text_blocks, "_BLOCK", 200)
    times = [SECONDS + number + part for number in range(40)]
    for place in (3, 35, 0):
        mixed = [*times[:place], int(times[place] * UNITS[unit]), *times[place + 1 :]]
        path = write(tmp_path, [0, *mixed, -1])
        with pytest.raises(ValueError, match="'timestamp' holds .*; convert .* one unit") as error:
            rows(path)
        message, found = str(error.value), max(place, 1)
        row = found + 2 + (write is as_csv)  # after a zero, from 1 on; text has a head
        assert re.search(rf"{path.name}, (line|row) {row}:", message), message
        assert f"{mixed[0]}" in message and f"{mixed[found]}" in message, message


@pytest.mark.parametrize(
    "times",
    [
        list(range(2000)),
        [19_000 + number % 400 for number in range(2000)],  # days
        [2024_0101_0000_00 + number for number in range(2000)],
        [number * 2_000_000_000 for number in range(2000)],  # nanoseconds since a start
        [(-1) ** number * 10 ** (number % 18) for number in range(2000)],
        [SECONDS - 3 * 10**8 * (number % 6) for number in range(2000)],  # from 1970 to 2023
        [SECONDS] * 1990 + [0] * 5 + [-1] * 5,
        [SECONDS * 1000 + number for number in range(2000)],
    ],
    ids=["counts", "days", "digits", "since a start", "magnitudes", "past", "unknown", "one unit"],
)
def test_other_integers_are_no_mixture(tmp_path, monkeypatch, times):
    monkeypatch.setattr(tables, "_ROWS", 100)
    assert [row["timestamp"] for row in rows(as_parquet(tmp_path, times))] == times


def test_files_of_different_units_are_converted_and_each_is_of_one(tmp_path):
    files = []
    for name, scale in (("a", 1), ("b", 1000)):
        (tmp_path / name).mkdir()
        files.append(as_csv(tmp_path / name, [(SECONDS + number) * scale for number in range(3)]))
    found = [row["timestamp"] for row in rows(files)]
    assert found == 2 * [(SECONDS + number) * 1000 for number in range(3)]
    files.append(as_parquet(tmp_path, [SECONDS, SECONDS * 1000]))
    with pytest.raises(ValueError, match=r"events\.parquet, row 2: .* milliseconds .* one unit"):
        rows(files)
