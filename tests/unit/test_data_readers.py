"""Files of anybody's: separators, headers, compression, folders, URLs; ids, times and labels of any
kind. Each against events that are known."""

from __future__ import annotations

import bz2
import gzip
import json
import tempfile
import zipfile
from collections import defaultdict
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.config.columns import Label, parse_columns, parse_labels
from freescale.data import prepare, read_interactions
from freescale.data.histories import HistoriesFile
from freescale.data.ingest import text_blocks
from freescale.data.ingest.ids import is_huge

EVENTS = [(196, 242, 881250949), (186, 302, 891717742), (196, 51, 881250949)]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path, **options) -> list[tuple]:
    batches = list(read_interactions(path, **options))
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def spell(separator: str, header: str = "") -> str:
    return header + "".join(separator.join(map(str, event)) + "\n" for event in EVENTS)


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("y.csv", spell(",", "user_id,item_id,timestamp\n"), ""),
        ("y.csv", "\ufeff" + spell(",", "userId,movieId,ts\n").replace("\n", "\r\n"), ""),
        ("y.csv", spell(";", '"Customer ID";StockCode;InvoiceDate\n'), ""),
        ("y.csv", "\n\n" + spell("|", "uid|sku|date\n"), ""),
        ("y.csv", spell(", ", "user, item, time\n"), ""),
        ("y.tsv", spell("\t", "reviewerID\tasin\tunixReviewTime\n"), ""),
        ("y.csv", spell(",", "who,what,when\n"), "user=who,item=what,time=when"),
        ("y.csv", spell(",", "item,user,when\n"), "user=item,item=user,time=when"),
        ("y.inter", spell("\t", "user_id:token\titem_id:token\ttimestamp:float\n"), ""),
        ("y.csv", spell(","), ""),  # three columns, the last one a time by its magnitude
        ("y.txt", spell(" "), "user=1,item=2,time=3"),
        ("y.csv", spell(",", '"x, y",user,item,time\n').replace("\n", "\n9,")[:-2], ""),
        ("y.csv", 'user_id,note,item_id,timestamp\n196,"a, ""b""\n\nc",242,881250949\n'
         '186,,302,891717742\n196,"",51,881250949', ""),
        ("y.jsonl", "".join(
            json.dumps({"uid": u, "n": [1], "movie": i, "time": t}) + "\n" for u, i, t in EVENTS
        ), ""),
        ("y.json", "\n".join(
            json.dumps({"user": str(u), "product_id": str(i), "timestamp": str(t)})
            for u, i, t in EVENTS
        ), ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", ["", ".gz", ".zip"])
def test_text_of_any_shape_has_the_same_events(tmp_path, name, content, columns, packed):
    path = write(tmp_path / name, content)
    if packed == ".gz":
        path = write(tmp_path / f"{name}.gz", gzip.compress(path.read_bytes()))
    elif packed:
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"inside/{name}", content)
            archive.writestr("__MACOSX/x", "")
    assert read(path, columns=columns) == EVENTS


@pytest.mark.parametrize("block", [8, 12, 64])
def test_no_block_ends_inside_of_quotation_marks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(text_blocks, "_BLOCK", block)
    rows = [f'{n},"""a\n{n},b\n",{n},{n}\n' for n in range(9)]
    path = write(tmp_path / "y.csv", "user,text,item,time\n" + "".join(rows))
    assert read(path) == [(n, n, n) for n in range(9)]


@pytest.mark.parametrize(
    ("content", "events"),
    [
        pytest.param(
            "7 3\n7 4\n8 3\n7 5\n", [(7, 3, 0), (7, 4, 1), (8, 3, 2), (7, 5, 3)], id="pairs"
        ),
        pytest.param("5 4\t4\n\n9  1\n2\n", [(0, 5, 0), (0, 4, 1), (0, 4, 2), (1, 9, 3), (1, 1, 4),
                                             (2, 2, 5)], id="sequences"),
        pytest.param("1 5 4\n2 9\n3 4 4 7\n", [(1, 5, 0), (1, 4, 1), (2, 9, 2), (3, 4, 3),
                                               (3, 4, 4), (3, 7, 5)], id="user-sequences"),
    ],
)  # fmt: skip
def test_lines_of_ids_are_in_order_of_time(tmp_path, monkeypatch, content, events):
    path = write(tmp_path / "lines.txt", content)
    assert read(path) == events
    layout = read_interactions(path).formats[0]
    monkeypatch.setattr(text_blocks, "_BLOCK", 3)
    assert read(path, format=layout) == events
    # the users of a second file are others, where lines are users
    second = [e[0] for e in read([path, path], format=layout)][len(events) :]
    users = 3 if layout == "sequences" else 0
    assert second == [event[0] + users for event in events]


def test_a_file_in_order_of_time_needs_no_times(tmp_path):
    path = write(tmp_path / "y.csv", "user,item\n1,5\n2,6\n1,7\n")
    assert read(path, columns="time=order") == [(1, 5, 0), (2, 6, 1), (1, 7, 2)]
    bare = write(tmp_path / "bare.csv", "1,2\n2,6\n")  # its first values are numbers of columns
    assert read(bare, columns="user=1,item=2,time=order") == [(1, 2, 0), (2, 6, 1)]


TIMES = [
    (["881250949", "881250950.0"], [881250949, 881250950], "integers, seconds since 1970"),
    (["1400000000000", "1"], [1400000000000, 1], "integers, milliseconds since 1970"),
    (["5", "3"], [5, 3], "integers, of no known unit"),
    (["1e9", "1000000000.25"], [10**15, 10**15 + 250_000], "fractions of seconds, as microseconds"),
    (["2024-05-31", "1969-12-31"], [1717113600, -86400],
     "dates without a time zone, as seconds since 1970"),
    (["2024-05-31 10:00", "2024-05-31T10:00:00.5"], [1717149600_000_000, 1717149600_500_000],
     "dates without a time zone, as microseconds since 1970"),
    (["2024-05-31T10:00:00Z", "2024-05-31T10:00:00+02:00"], [1717149600, 1717142400],
     "dates with a time zone, as seconds since 1970"),
]  # fmt: skip


@pytest.mark.parametrize(("texts", "expected", "meaning"), TIMES)
@pytest.mark.parametrize("block", [1 << 20, 4])
def test_times_of_any_kind(tmp_path, monkeypatch, texts, expected, meaning, block):
    monkeypatch.setattr(text_blocks, "_BLOCK", block)  # what comes late is read like the rest
    content = "".join(f"1,2,{text}\n" for text in texts)
    path = write(tmp_path / "y.csv", "user_id,item_id,date\n" + content)
    made = HistoriesFile(prepare(path, tmp_path / "cache"))
    assert made.read(0, ("timestamp",)).values["timestamp"].tolist() == sorted(expected)
    assert f"date -> time ({meaning})" in made.read_as[0]


def test_dates_and_decimals_of_parquet(tmp_path):
    columns = {"user_id": ["a", "b"], "item_id": [1.0, 2.0]}
    dates = pa.array([1, 2], pa.date32())
    pq.write_table(pa.table({**columns, "date": dates}), tmp_path / "y.parquet")
    assert read(tmp_path / "y.parquet") == [(0, 1, 86400), (1, 2, 172800)]


def decode(path: Path) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = defaultdict(dict)
    vocabulary = path.parent / "vocabulary.parquet"
    for row in pq.read_table(vocabulary).to_pylist() if vocabulary.is_file() else []:
        found[row["column"]][row["id"]] = row["text"]
    return found


@pytest.mark.parametrize(
    ("items", "stay", "words"),
    [
        pytest.param([7, 196, 7], True, "item_id -> item (integers)", id="integers"),
        pytest.param(["7", "x", "7"], False, "(2 strings)", id="strings"),
        pytest.param(["7.0", "x", "7.5"], False, "(3 strings)", id="points"),
        pytest.param(["7", "007", "0x7"], False, "strings, with leading zeros", id="zeros"),
        pytest.param([7, -1, 7], False, "some of them negative; numbered anew", id="negative"),
        pytest.param([7, 10**9, 7], False, "integers up to 1,000,000,000; numbered", id="huge"),
        pytest.param([7, 2**63, 7], False, "(2 strings)", id="beyond int64"),
    ],
)
def test_integer_ids_stay_and_others_are_coded(tmp_path, monkeypatch, items, stay, words):
    monkeypatch.setattr(text_blocks, "_BLOCK", 8)
    content = "".join(f"5,{item},{time}\n" for time, item in enumerate(items))
    path = write(tmp_path / "y.csv", "user_id,item_id,timestamp\n" + content)
    made = prepare(path, tmp_path / "cache")
    file, texts = HistoriesFile(made), decode(made)["item_id"]
    found = file.read(0, ("item_id",)).values["item_id"].tolist()
    assert [texts[item] if texts else item for item in found] == [
        item if stay else str(item) for item in items
    ]
    assert bool(texts) != stay and words in file.read_as[0]
    assert file.num_items == (max(items) + 1 if stay else len(set(items)))


def test_whole_numbers_with_a_point_are_integers_as_in_parquet(tmp_path):
    """As programs write integers of a column with gaps; texts like them are none."""
    content = "user_id,item_id,timestamp\n5.0,12.0,1\n5.00,0.0,2\n5,12,3\n"
    assert read(write(tmp_path / "y.csv", content)) == [(5, 12, 1), (5, 0, 2), (5, 12, 3)]
    floats = {"user_id": [5.0] * 3, "item_id": [12.0, 0.0, 12.0], "timestamp": [1, 2, 3]}
    pq.write_table(pa.table(floats), tmp_path / "y.parquet")
    assert read(tmp_path / "y.parquet") == read(tmp_path / "y.csv")
    strings = write(tmp_path / "z.csv", content + "5,07.0,4\n")
    assert decode(prepare(strings, tmp_path / "cache"))["item_id"][0] == "12.0"


def test_a_catalogue_is_huge_when_most_of_its_rows_would_be_unused():
    assert is_huge(1 << 20, 1000) and is_huge(10**9, 10**8 - 1)
    assert not is_huge((1 << 20) - 1, 1) and not is_huge(10**9, 10**8 + 1)


ids = st.one_of(st.integers(-3, 30), st.sampled_from(["a", "B c", "ü", "007", '"q"', "x,y"]))
rows = st.lists(st.tuples(ids, ids, st.integers(0, 9)), min_size=1, max_size=30)


@settings(max_examples=25, deadline=None)
@given(rows=rows, block=st.sampled_from([5, 64, 1 << 20]), form=st.sampled_from(["csv", "jsonl"]))
def test_every_id_comes_back_from_the_vocabulary(rows, block, form):
    """Whatever ids a file holds, and wherever the first string is: histories are those of a plain
    loop over its rows."""
    users: dict[str, list] = defaultdict(list)
    for user, item, time in rows:
        users[str(user)].append((time, str(item)))
    expected = {
        user: [item for _, item in sorted(events, key=lambda event: event[0])]
        for user, events in users.items()
        if len(events) > 1
    }
    quote = lambda value: '"' + str(value).replace('"', '""') + '"'  # noqa: E731
    if form == "csv":
        lines = [f"{quote(u)},{quote(i)},{t}" for u, i, t in rows]
        content = "user_id,item_id,timestamp\n" + "\n".join(lines) + "\n"
    else:
        events = [{"user_id": str(u), "item_id": str(i), "timestamp": t} for u, i, t in rows]
        content = "\n".join(json.dumps(event, ensure_ascii=False) for event in events)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "_BLOCK", block)
        path = write(Path(folder) / f"y.{form}", content)
        if not expected:
            with pytest.raises(ValueError, match="no user has 2 or more events"):
                prepare(path, Path(folder) / "cache")
            return
        made = prepare(path, Path(folder) / "cache")
        texts, found = decode(made), {}
        for row in pq.read_table(made).to_pylist():
            user = texts["user_id"].get(row["user_id"], str(row["user_id"]))
            items = [texts["item_id"].get(item, str(item)) for item in row["item_id"]]
            found[user] = items
    assert found == expected


def test_ratings_and_kinds_of_events_are_actions(tmp_path):
    rated = write(tmp_path / "r.csv", "user,item,time,rating,title\n1,2,3,4.5,x\n")
    assert read(rated) == [(1, 2, 3, 9)]
    assert read(rated, columns="rating=") == [(1, 2, 3)]
    logged = write(tmp_path / "e.csv", "user,item,time,event_type\n1,2,3,view\n1,2,4,buy\n")
    reader = read_interactions(logged)
    assert [row["action"] for batch in reader for row in batch.to_pylist()] == [0, 1]
    assert list(reader.vocabulary.columns["action"]) == ["view", "buy"]


# ---- labels and columns


def test_labels_are_made_by_comparisons(tmp_path):
    header = "user,item,time,rating,kind,liked\n"
    path = write(tmp_path / "y.csv", header + "1,2,3,4.5,buy,true\n1,2,4,3,view,false\n")
    rules = "like=rating>=4,bought=kind==buy,low=rating<4,other=kind!='buy',liked"
    made = prepare(path, tmp_path / "cache", labels=rules)
    values = HistoriesFile(made).read(0, ("like", "bought", "low", "other", "liked")).values
    assert {name: column.tolist() for name, column in values.items()} == {
        "like": [1, 0], "bought": [1, 0], "low": [0, 1], "other": [0, 1], "liked": [1, 0],
    }  # fmt: skip
    assert prepare(path, tmp_path / "cache") != made
    with pytest.raises(ValueError, match=r"y.csv: column 'stars', .*missing.*rating, kind"):
        prepare(path, tmp_path / "cache", labels="like=stars>3")
    with pytest.raises(ValueError, match=r"y.csv, line 2: column 'kind' holds 'buy', not a number"):
        prepare(path, tmp_path / "cache", labels="like=kind>3")
    with pytest.raises(ValueError, match=r"histories.parquet: a histories file.*like=rating>=4"):
        prepare(made, tmp_path / "cache", labels="like=rating>=4")


def test_labels_and_columns_are_parsed():
    assert parse_labels("click, like=rating >= 4,b=kind=='4'") == (
        Label("click", "click"),
        Label("like", "rating", ">=", 4.0),
        Label("b", "kind", "==", "4"),
    )
    assert [label.text for label in parse_labels("x=a=1.5,y=b!=z")] == ["x=a==1.5", "y=b!='z'"]
    assert parse_columns("user=a, item=b c,rating=") == {"user": "a", "item": "b c", "rating": ""}


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_labels, "rating>=4", "'rating>=4': name a column, or write name=column>=number"),
        (parse_labels, "a=b", "like=rating>=4"),
        (parse_labels, "a=__import__('os')", "like=rating>=4"),
        (parse_labels, "a=b>c", "> compares numbers, 'c' is none"),
        (parse_labels, "a=b>1,a", "names 'a' twice"),
        (parse_labels, "a=b=>4", "'a=b=>4': name a column"),
        (parse_labels, "a=b= >4", "'a=b= >4': name a column"),
        (parse_labels, "a=b>=", "'a=b>=': name a column"),
        (parse_labels, "a=b>=nan", "nothing compares with nan"),
        (parse_labels, "item_id=b>4", "'item_id' is a column of every history"),
        (parse_labels, "timestamp", "'timestamp' is a column of every history"),
        (parse_labels, "action=b>4", "'action' is a column of every history"),
        (parse_columns, "user", "'user': write role=column"),
        (parse_columns, "who=x", "with a role of user, item, time, rating, action"),
        (parse_columns, "item=", "no column for item"),
        (parse_columns, "user=a,user=b", "user twice"),
    ],
)
def test_bad_labels_and_columns(parse, text, words):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert words in str(error.value)


def test_a_column_may_have_any_name(tmp_path):
    path = shard(
        tmp_path / "y.parquet", (1, 2, 3), (1, 3, 1), (2, 3, 9), (2, 4, 8), last=[1, 0, 5, 6]
    )
    made = HistoriesFile(prepare(path, tmp_path / "cache"))
    values = made.read(0, ("item_id", "last")).values
    assert values["item_id"].tolist() == [3, 2, 4, 3] and values["last"].tolist() == [0, 1, 6, 5]


def test_one_column_is_not_two(tmp_path):
    path = write(tmp_path / "y.csv", "user,item,time\n1,2,3\n")
    with pytest.raises(ValueError, match="'item' as user and as item; the file has user, item"):
        read(path, columns="user=item,item=item")


def test_a_word_for_nothing_is_an_id_among_strings(tmp_path):
    path = write(tmp_path / "y.csv", "user,item,time\nnull,2,3\nann,2,3\n")
    assert [row[0] for row in read(path)] == [0, 1]


# ---- several files


def shard(path: Path, *events: tuple, **more) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("user_id", "item_id", "timestamp")
    table = {name: [event[i] for event in events] for i, name in enumerate(names)}
    pq.write_table(pa.table(table | more), path)
    return path


def test_folders_and_patterns(tmp_path):
    first = shard(tmp_path / "hub" / "data" / "train-00000-of-00002.parquet", (1, 2, 3))
    shard(tmp_path / "hub" / "data" / "train-00001-of-00002.parquet", (1, 4, 5))
    write(tmp_path / "hub" / "README.md", "about")
    write(tmp_path / "hub" / ".cache.parquet", "hidden")
    assert read(tmp_path / "hub") == read(f"{tmp_path}/hub/**/*.parquet") == [(1, 2, 3), (1, 4, 5)]
    assert read([first, tmp_path / "hub" / "data"])[1] == (1, 2, 3)
    more = shard(tmp_path / "more.parquet", (1, 6, 7), price=[0.5])  # what not all have is left out
    assert read([first, more]) == [(1, 2, 3), (1, 6, 7)] and read(more) == [(1, 6, 7, 0.5)]
    for part in ("a", "b"):
        (tmp_path / "logs").mkdir(exist_ok=True)
        write(tmp_path / "logs" / f"{part}.csv", f"user,item,time\n{ord(part)},2,3\n")
    assert read(tmp_path / "logs") == read(tmp_path / "logs" / "*.csv") == [(97, 2, 3), (98, 2, 3)]


def test_empty_files_among_others_are_left_out_and_counted(tmp_path):
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "a.csv", "")
    write(tmp_path / "logs" / "b.csv", "user,item,time\n1,2,3\n1,4,5\n")
    assert read(tmp_path / "logs") == [(1, 2, 3), (1, 4, 5)]
    assert (
        "1 empty file left out"
        in HistoriesFile(prepare(tmp_path / "logs", tmp_path / "cache")).read_as
    )
    first = shard(tmp_path / "hub" / "part-0.parquet")
    shard(tmp_path / "hub" / "part-1.parquet", (1, 2, 3))
    assert read(tmp_path / "hub") == [(1, 2, 3)]
    with pytest.raises(ValueError, match="part-0.parquet: the file has no events"):
        read(first)


def test_columns_of_a_histories_file_are_not_named(tmp_path):
    made = prepare(write(tmp_path / "y.csv", "user,item,time\n1,2,3\n1,4,5\n"), tmp_path / "cache")
    with pytest.raises(ValueError, match="a histories file, .* leave --columns out"):
        prepare(made, tmp_path / "cache", columns="user=who,item=what,time=when")


def test_numeric_columns_with_gaps_are_left_out_and_named(tmp_path):
    path = shard(tmp_path / "y.parquet", (1, 2, 3), (1, 3, 4), price=[None, 2.0], shown=[1, 0])
    made = HistoriesFile(prepare(path, tmp_path / "cache"))
    assert made.columns == ("item_id", "timestamp", "shown")
    assert made.read_as[1] == "columns left out: price (with missing values: price)"


def test_rows_without_an_id_can_be_dropped(tmp_path):
    path = write(tmp_path / "y.csv", "user,item,time\n1,2,3\n,2,3\n1,,4\n1,5,6\n1,6,x\n")
    with pytest.raises(ValueError, match=r"y.csv, line 3: column 'user' is missing.* drop"):
        prepare(path, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"y.csv, line 6: column 'time' holds 'x', not a time"):
        prepare(path, tmp_path / "cache", missing="drop")
    write(path, path.read_text().replace(",x", ",7"))
    made = HistoriesFile(prepare(path, tmp_path / "cache", missing="drop"))
    assert made.read(0, ("item_id",)).values["item_id"].tolist() == [2, 5, 6]
    assert made.read_as[-1] == "2 rows without user, item or time left out"


def test_urls_are_read_through_fsspec(tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/shop/a.csv", b"user,item,time\n1,2,3\n1,3,4\n")
    memory.pipe("/shop/b.csv", b"user,item,time\n2,2,3\n2,3,x\n")
    made = prepare("memory://shop/a.csv", tmp_path / "cache")
    assert HistoriesFile(made).num_samples == 1
    copies = list((tmp_path / "cache" / "remote").rglob("a.csv"))
    assert prepare("memory://shop/a.csv", tmp_path / "cache") == made
    assert list((tmp_path / "cache" / "remote").rglob("a.csv")) == copies
    with pytest.raises(ValueError, match=r"memory://.*shop/b.csv, line 3: column 'time' holds 'x'"):
        prepare("memory://shop/*.csv", tmp_path / "cache")
    with pytest.raises(ValueError, match="memory://shop/c.csv: no such file"):
        prepare("memory://shop/c.csv", tmp_path / "cache")
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("in/a.csv", "user,item,time\n1,2,3\n1,3,4\n")
        archive.writestr("about.txt", "")
    memory.pipe("/shop/y.zip", packed.getvalue())
    assert read("memory://shop/y.zip/in/a.csv", cache=tmp_path) == [(1, 2, 3), (1, 3, 4)]
    with pytest.raises(ValueError, match=r"shop/y.zip/in/a.csv") as error:
        read("memory://shop/y.zip", cache=tmp_path)
    named = str(error.value).rpartition("name one: ")[2]
    assert read(named, cache=tmp_path) == [(1, 2, 3), (1, 3, 4)]
    with pytest.raises(ValueError, match=r"shop/y.zip: the archive has no b.csv; it holds in/a"):
        read("memory://shop/y.zip/b.csv", cache=tmp_path)
    memory.rm("/shop", recursive=True)


def test_a_missing_package_is_named(monkeypatch):
    import fsspec.core

    def refuse(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ValueError, match="s3://shop/a.csv: .*pip install s3fs"):
        read_interactions("s3://shop/a.csv")


# ---- bad files


def table(content: str | bytes, name: str = "y.csv"):
    return lambda folder: write(folder / name, content)


def pack(*names: str, change: dict[int, int] | None = None):
    """An archive of these files, with some of its bytes changed."""

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "y.zip", "w") as archive:
            for name in names:
                archive.writestr(name, "user,item,time\n1,2,3\n")
        content = bytearray((folder / "y.zip").read_bytes())
        for place, value in (change or {}).items():  # below 0: of the central directory
            content[place if place >= 0 else content.index(b"PK\1\2") - place] = value
        return write(folder / "y.zip", bytes(content))

    return make


def repeat_a_column(folder: Path) -> Path:
    columns = [pa.array([1, 1])] * 4
    names = ["user_id", "item_id", "item_id", "timestamp"]
    pq.write_table(pa.Table.from_arrays(columns, names=names), folder / "y.parquet")
    return folder / "y.parquet"


def leave_out_an_item(folder: Path) -> Path:
    return shard(folder / "y.parquet", (1, 2.0, 3), (1, float("nan"), 4))


def overwrite_values(folder: Path) -> Path:
    path = shard(folder / "y.parquet", *((1, item, item) for item in range(1000)))
    content = bytearray(path.read_bytes())
    content[60:160] = bytes([255]) * 100
    return write(path, bytes(content))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (table("a,b,c\nx,y,z\n"), ["y.csv: cannot tell", "a,b,c", "--columns user=NAME"]),
        (table("user,item,time,x\n1,2,3,4\n"), None),
        (table("user,item,time\n1,2,3\n1,2\n"), ["line 3", "Expected 3 columns, got 2"]),
        (table("user,item,time\n1,2,3\n\n1,3,soon\n"), ["line 4", "'time'", "'soon'", "1970"]),
        (table("user,item,time\n1,2,2024-01-01\n1,3,2024-13-01\n"), ["line 3", "'2024-13-01'"]),
        (table("user,item,time\n1,2,2024-01-01\n1,3,2024-01-02T00:00Z\n"), ["line 3", "zone"]),
        (table("user,item,time\n1,2,3\n1,3,nan\n"), ["line 3", "'nan'", "not a time"]),
        (table("user,item,time,rating\n1,2,3,-1\n"), ["line 2", "'rating'", "-1", "rating="]),
        (table('user,item,time\n1,"2,3\n1,3,4\n'), ["y.csv"]),
        (table('[{"user": 1}]', "y.json"), ["JSON array", "one object a line"]),
        (table('{"user":1,"item":2,"time":3}\n{"user":1,\n', "y.jsonl"), ["line 2", "JSON"]),
        (table('{"user":1,"item":2,"time":3}\n{"user":1,"item":"b","time":3}\n', "y.jsonl"),
         ["line 2", "'item' holds 'b'", "number to string"]),
        (table('{"user":1,"item":2,"time":3}\n' * 1500 + '{"user":1,"item":}\n', "y.jsonl"),
         ["line 1501", "not a JSON object", '"item":}']),
        (table('{"user":1,"item":2.5,"time":3}\n', "y.jsonl"), ["line 1", "'item'", "2.5"]),
        (table("some words\nare no events\n", "y.txt"), ["cannot tell", "sequences"]),
        (table("1 2\n" * 2000 + "1 2 3\n", "y.txt"), ["line 2001", "3 values", "1 2 3"]),
        (table("1 2\n" * 20 + "1 2 3\n", "y.txt"), ["line 21", "3 values", "1 2 3", "sequences"]),
        (table("user_id:token\ttime:float\n1\t2\n", "y.inter"), ["as item", "--columns item="]),
        (table("user,what,time\n1,2,3\n"), ["as item among 'user', 'what'", "--columns item="]),
        (table("user,item,time,x\n1,2,3,\"a\nb\"\n1,2,soon,c\n"), ["line 4", "'soon'"]),
        (table("user,item,time,x\n1,2,3,5\" a\n1,2,soon,c\n"), ["line 3", "'soon'"]),
        (table("user,item,item,time\n1,2,3,4\n"), ["2 columns are named 'item'", "rename"]),
        (table("user,item,time\n1,2,3\n1,NaN,4\n"), ["line 3", "'item'", "'NaN'", "drop"]),
        (table("user,item,time\n1,2,3\n1,2,1e25\n"), ["line 3", "'time'", "1e+25", "64 bits"]),
        (table("user,item,time\r1,2,3\r"), ["y.csv, line 1", "carriage returns", "tr "]),
        (table("user,item,time\n1,2,3\n".encode("utf-16")), ["y.csv: text in UTF-16", "UTF-8"]),
        (table(b"\0\1\2\3\n"), ["y.csv, line 1", "not text"]),
        (table(bz2.compress(b"user,item,time\n1,2,3\n")), ["bzip2", "gzip"]),
        (table(gzip.compress(b"user,item,time\n1,2,3\n")), ["gzip", ".gz"]),
        (repeat_a_column, ["2 columns are named 'item_id'", "rename"]),
        (leave_out_an_item, ["y.parquet, row 2", "'item_id'", "nan"]),
        (overwrite_values, ["y.parquet, after row 0", "damaged", "write it again"]),
        (lambda folder: folder / "*.csv", ["no file fits the pattern"]),
        (lambda folder: folder, ["the folder has no Parquet", "pattern"]),
        (pack("a.csv", "b.csv"), ["y.zip", "2 files (a.csv, b.csv)", "y.zip/a.csv"]),
        (pack("a.parquet"), ["y.zip/a.parquet", "unpack"]),
        (lambda folder: pack("a.csv")(folder) / "c.csv", ["y.zip", "no c.csv", "holds a.csv"]),
        (table("not a zip", "y.zip"), ["y.zip", "broken zip"]),
        (pack(), ["y.zip", "no files"]),
        (pack("a.csv", change={0: 0}), ["y.zip/a.csv", "broken zip", "fetch"]),
        (pack("a.csv", change={6: 1, -8: 1}), ["y.zip/a.csv", "encrypted", "unpack"]),
        (pack("a.csv", change={8: 97, -10: 97}), ["y.zip/a.csv", "compression", "unpack"]),
    ],
)  # fmt: skip
def test_bad_files_are_one_line_and_leave_nothing(tmp_path, make, words):
    (tmp_path / "data").mkdir()
    path, cache = make(tmp_path / "data"), tmp_path / "cache"
    with pytest.raises(ValueError) as error:
        prepare(path, cache)
    message = str(error.value)
    assert "\n" not in message
    for word in words or ["no user has 2"]:
        assert word in message, message
    left = [entry for entry in cache.iterdir() if entry.name != "digests"] if cache.exists() else []
    assert left == []


@pytest.mark.parametrize(
    ("name", "content", "labels", "fingerprint"),
    [
        ("ratings.dat", "1::2::3::4\n1::3::4::5\n", "action", "2867115da09b9a160e997ba253315aed"),
        (
            "log.csv",
            "user_id,video_id,time_ms,is_click\n1,2,3,1\n1,3,4,0\n",
            "is_click",
            "e33fc8d951cd1e4ce53d70c1000a7ed8",
        ),
        ("a.csv", "AX,B0,5.0,100\nAX,B1,5.0,101\n", "", "1b4863ea8bc22706fb98d83e246d65b0"),
    ],
)
def test_earlier_runs_go_on_with_data_that_is_read_as_before(
    tmp_path, name, content, labels, fingerprint
):
    path = write(tmp_path / name, content)
    assert HistoriesFile(prepare(path, tmp_path / "c", labels=labels)).fingerprint == fingerprint


def test_earlier_runs_do_not_go_on_with_integers_that_were_recoded(tmp_path):
    path = write(tmp_path / "i.csv", "1,2,5.0,100\n1,3,5.0,101\n")
    recoded = "8a7f71a76ee46541078612e4a2c8ffbd"
    assert HistoriesFile(prepare(path, tmp_path / "c")).fingerprint != recoded
