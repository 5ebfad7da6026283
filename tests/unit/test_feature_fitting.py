"""Features as rows of a table: categories, buckets, lists and crosses, by the training part."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.config.features import Feature
from freescale.data.feature_values import hash_keys, read_keys, read_numbers, read_vectors
from freescale.data.features.attributes import open_attributes
from freescale.data.features.fitting import (
    count_cut,
    count_rows,
    encode_all,
    fit_feature,
    from_json,
    stack_rows,
    to_json,
)
from freescale.data.features.inference import complete_kinds, infer_column
from freescale.data.features.store import encode_parts, write_codes
from freescale.data.ingest.sources import SourceFile
from freescale.data.ingest.tables import read_tables
from freescale.data.values import BadValue

ALL = np.ones(6, np.int64)


def fit(kind, values, counts=ALL, **settings):
    feature = Feature("x", "item", kind, ("x",), **settings)
    return fit_feature(feature, {"x": pa.array(values)}, np.asarray(counts))


def test_categories_are_those_of_the_training_part():
    fitted = fit("categorical", ["b", "a", None, "b", "c", ""], [1, 2, 1, 0, 0, 1])
    assert fitted.categories == ("a", "b")  # c has no training event
    rows = fitted.encode({"x": pa.array(["a", "b", "c", None, " ", "b "])})
    assert rows[:, 0].tolist() == [2, 3, 1, 0, 0, 3]  # missing 0, unknown 1
    assert fitted.rows == 4
    often = fit("categorical", ["b", "a", "b", "a", "b", "c"], least=3)
    assert often.categories == ("b",)
    of_events = fit("categorical", ["a", "b", "c"], [5, 4, 0], least=5)  # each with its events
    assert of_events.categories == ("a",)


def test_a_category_is_the_same_in_every_format():
    for values in ([3, 12], [3.0, 12.0], ["3", " 12 "]):
        assert read_keys(pa.array(values)).to_pylist() == ["3", "12"]
    assert read_keys(pa.array([True, None])).to_pylist() == ["true", None]
    assert read_keys(pa.array([2.5, float("nan")])).to_pylist() == ["2.5", None]


def test_buckets_have_about_equally_many_training_values():
    values = [*range(1, 101), 10_000.0, float("nan")]
    counts = [1] * 100 + [0, 0]
    fitted = fit("numeric", values, counts, buckets=4)
    assert len(fitted.edges) == 3 and max(fitted.edges) <= 100
    rows = fitted.encode({"x": pa.array(values)})[:, 0]
    assert np.bincount(rows[:100], minlength=5)[1:].tolist() == [24, 25, 25, 26]
    assert rows[100] == 4 and rows[101] == 0  # beyond the last edge; missing
    alike = fit("numeric", [7.0] * 5 + [8.0])
    assert fit("numeric", [7.0] * 6).rows == 2
    assert alike.encode({"x": pa.array([7.0, 8.0])})[:, 0].tolist() == [1, 2]


def test_numbers_as_text_and_what_is_no_number():
    assert read_numbers(pa.array(["1.5", "", None]))[0] == 1.5
    with pytest.raises(BadValue, match="holds 'cheap', not a number"):
        read_numbers(pa.array(["1", "cheap"]))
    for values in (["1", "inf"], [1.0, -np.inf]):
        with pytest.raises(BadValue, match="numbers are finite") as error:
            read_numbers(pa.array(values))
        assert error.value.row == 1


def test_lists_have_as_many_places_as_training_items_need():
    values = [["a", "b"], [], None, ["b", None, "c"], ["a"] * 5, ["d"]]
    fitted = fit("multi", values, [1, 1, 1, 1, 0, 1])
    assert fitted.categories == ("a", "b", "c", "d") and fitted.places == 2
    (stacked,) = stack_rows([fitted])
    rows = stacked.encode({"x": pa.array(values)})
    # row 0 is nothing, 1 missing, 2 unknown
    assert rows.tolist() == [[3, 4], [1, 0], [1, 0], [4, 5], [3, 3], [6, 0]]
    assert count_cut(fitted, {"x": pa.array(values)}) == 3
    text = fit("multi", ["a|b", "", None, "b| c", "a", "d"])
    assert text.categories == fitted.categories


def test_vectors_have_length_1_and_one_width():
    values = pa.array([[3.0, 4.0], None, [0.0, 0.0], []])
    assert read_vectors(values).tolist() == [[0.6000000238418579, 0.800000011920929], *[[0, 0]] * 3]
    assert fit("vector", [[1.0, 2.0, 3.0]] * 6).width == 3
    for wrong, message in (
        ([1.0], "vector of 1 numbers, those before have 2"),
        ([1.0, float("nan")], "not finite"),
        ([1.0, None], "not finite"),
    ):
        with pytest.raises(BadValue, match=message) as error:
            read_vectors(pa.array([[3.0, 4.0], None, wrong]))
        assert error.value.row == 2
    with pytest.raises(BadValue, match="not lists of numbers"):
        read_vectors(pa.array(["a"]))


def test_the_hash_of_a_cross_never_changes():
    """A served model meets the hashes of its training."""
    found = hash_keys([pa.array(["red", None]), pa.array(["7", "7"])])
    assert found.tolist() == [7659972981298662938, -6001841121116985465]


def test_a_cross_tells_combinations_apart():
    feature = Feature("x*y", "item", "cross", ("x", "y"), rows=1 << 40)
    columns = {"x": pa.array(["a", "b", "a", "ab"]), "y": pa.array(["b", "a", "b", ""])}
    fitted = fit_feature(feature, columns, np.ones(4))
    hashes = hash_keys([read_keys(columns["x"]), read_keys(columns["y"])])
    assert len(set(hashes.tolist())) == 3 and hashes[0] == hashes[2]
    assert fitted.rows == 1 << 40


def test_all_features_of_a_source_share_a_table():
    columns = {"x": pa.array(["a", "b"]), "y": pa.array([1.0, 2.0])}
    declared = [
        Feature("x", "item", "categorical", ("x",)),
        Feature("y", "item", "numeric", ("y",)),
        Feature("x*y", "item", "cross", ("x", "y"), rows=10),
    ]
    fitted = stack_rows(fit_feature(each, columns, np.ones(2)) for each in declared)
    assert [each.first for each in fitted] == [1, 5, 8] and count_rows(fitted) == 18
    assert count_rows([]) == 0
    rows = encode_all(fitted, columns)
    assert rows[:, :2].tolist() == [[3, 6], [4, 7]] and (rows[:, 2] >= 8).all()
    again = from_json(to_json(fitted))
    assert again == fitted


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["toys", "books", "toys", "food"] * 9, "categorical"),
        ([1.5, 2.5, 3.25, None] * 9, "numeric"),
        ([*range(60)], "numeric"),
        ([1, 2, 3, 4] * 9, "categorical"),
        (["1.5", "2.5", "", "3.5"] * 9, "numeric"),
        (["007", "008", "009"] * 9, "categorical"),
        (["a|b", "a", "b|c", ""] * 9, "multi"),
        ([["a"], ["b", "a"], []] * 9, "multi"),
        ([True, False] * 9, "categorical"),
        ([[0.5, 0.25], None, []] * 9, "vector"),
    ],
)
def test_kinds_are_inferred(values, kind):
    column = infer_column("x", "item", pa.array(values))
    assert column.feature.kind == kind and column.used


@pytest.mark.parametrize(
    ("values", "declared", "kind"),
    [
        ([*map(str, range(60))] * 2, "token", "categorical"),
        (["a|b", "c|d"] * 9, "token", "categorical"),
        (["1", "2"] * 9, "float", "numeric"),
        (["007", "008"] * 9, "float", "numeric"),
        ([f"The Only{n}" for n in range(200)], "token_seq", "multi"),
        (["1 2", "2", ""], "token_seq", "multi"),
    ],
)
def test_the_types_of_a_recbole_header_decide(values, declared, kind):
    column = infer_column("x", "item", pa.array(values), declared)
    assert column.feature.kind == kind and column.used
    if kind == "multi":
        assert column.feature.separator == " "


def test_a_recbole_header_overrules_no_rule_about_many_values():
    titles = pa.array([f"title {n}" for n in range(200)])
    assert "most values occur once" in infer_column("x", "item", titles, "token").reason
    with pytest.raises(BadValue, match="holds 'title 0', not a number"):
        infer_column("x", "item", titles, "float")
    column = infer_column("x", "item", pa.array(["0.5 1", None]), "float_seq")
    assert not column.used and "give them as lists, in Parquet" in column.reason


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([None, None], "no values"),
        (["same"] * 9, "all the same"),
        ([7] * 9, "all the same"),
        ([f"title {n}" for n in range(200)], "most values occur once; name it to use it"),
        ([{"a": 1}] * 3, "holds struct"),
    ],
)
def test_columns_that_are_left_out_say_why(values, reason):
    column = infer_column("x", "item", pa.array(values))
    assert not column.used and reason in column.reason
    with pytest.raises(ValueError, match="say which, as x=categorical"):
        complete_kinds([column.feature], [column])


def test_a_category_of_many_values_is_used_if_it_is_named():
    values = pa.array([str(n) + "x" for n in range(120_000)])
    column = infer_column("x", "item", values)
    assert "120,000 values are many" in column.reason
    named = Feature("x", "item", "categorical", ("x",))
    assert complete_kinds([named], [column]) == [named]
    assert len(fit_feature(named, {"x": values}, np.ones(120_000)).categories) == 120_000


def test_parts_of_rows_are_read_and_encoded_like_all_rows(monkeypatch):
    columns = {
        "text": pa.array(["a", " b", None, "", "c", "a", "b"]),
        "tags": pa.array([["x", "y"], None, [], ["y", None], ["z"], ["x"] * 20, ["y"]]),
        "split": pa.array(["x|y", None, "", "y", "z|x|y", "x", "|"]),
        "price": pa.array([1.5, None, 2.0, float("nan"), 3.0, 4.0, 1.5]),
    }
    declared = [
        Feature("text", "item", "categorical", ("text",)),
        Feature("tags", "item", "multi", ("tags",)),
        Feature("split", "item", "multi", ("split",), separator="|"),
        Feature("price", "item", "numeric", ("price",)),
        Feature("both", "item", "cross", ("text", "price"), rows=50),
    ]
    found = []
    for rows in (100, 3):
        for module in ("feature_values", "features.store"):
            monkeypatch.setattr(f"freescale.data.{module}.PART", rows)
        fitted = stack_rows(fit_feature(each, columns, np.ones(7)) for each in declared)
        found.append((fitted, [encode_parts(each, columns) for each in fitted]))
    (whole, codes), (parts, others) = found
    assert whole == parts
    for one, other, each in zip(codes, others, whole, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, each.encode(columns))


def test_codes_are_written_as_numpy_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr("freescale.data.features.store.PART", 2)
    columns = {"x": pa.array(["a", "b", None])}
    (fitted,) = stack_rows(
        [fit_feature(Feature("x", "item", "categorical", ("x",)), columns, ALL[:3])]
    )
    codes = encode_parts(fitted, columns)
    rows = np.array([2, -1, 0, 1, -1])
    write_codes(tmp_path / "mine.npy", [fitted], [codes], rows)
    np.save(
        tmp_path / "numpy.npy", np.concatenate([codes, [[fitted.first]]]).astype(np.int32)[rows]
    )
    assert (tmp_path / "mine.npy").read_bytes() == (tmp_path / "numpy.npy").read_bytes()


def test_text_beyond_arrow_is_refused_by_name(tmp_path, monkeypatch):
    path = tmp_path / "items.parquet"
    pq.write_table(pa.table({"item_id": [1], "title": ["t" * (1 << 25)]}), path)
    source = open_attributes(SourceFile(path, "items.parquet"), "item", "item_id")
    (block,) = read_tables(source.file, source.layout, ["title"])
    monkeypatch.setattr(
        "freescale.data.features.attributes.read_tables", lambda *_: iter([block] * 65)
    )
    with pytest.raises(ValueError, match="column 'title' holds more than 2 GB of text; drop it"):
        source.read(["title"])
